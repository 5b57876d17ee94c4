/// The merge of a log, divided and converted, against the model; and of blocks that do not go together.
#include "decode.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Bytes bytes(data, size);
  {
    const bool foreign = bytes.below(8) == 0;
    const FuzzLog log(bytes);
    log.check();
    if (foreign) {  // A block of another spec or width: an exception, or a result of the right form.
      gq::Spec other = decode_spec(bytes);
      const std::size_t width = fuzz_widths[bytes.below(std::size(fuzz_widths))];
      const Offer offer = decode_offer(bytes, other, width);
      const gq::Block block = block_of(other, offer, width, false);
      std::vector<const gq::Block*> all = log.log();
      all.insert(all.begin() + static_cast<std::ptrdiff_t>(bytes.below(all.size() + 1)), &block);
      try {
        const gq::Merged merged = gq::merge_log(log.spec, all.data(), all.size(), log.width, 1);
        const std::int64_t* const ids = merged.ids.as<std::int64_t>();
        for (std::size_t i = 1; i < merged.num_rows; ++i) CHECK(ids[i - 1] < ids[i]);
      } catch (const std::invalid_argument&) {
      }
    }
  }
  check_pool();
  return 0;
}
