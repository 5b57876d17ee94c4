/// Order-and-sum: one gradient as it comes, put in order, repeats summed.
#include "decode.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Bytes bytes(data, size);
  {
    gq::Spec spec = decode_spec(bytes);
    const std::size_t width = fuzz_widths[bytes.below(std::size(fuzz_widths))];
    const bool lend = bytes.flag();
    const bool check_finite = bytes.flag();
    const Offer offer = decode_offer(bytes, spec, width);
    spec.reduction = gq::Reduction::sum;  // What a block holds is the sum of its repeats.
    const gq::Block block = block_of(spec, offer, width, lend, check_finite);
    const Expected expected = model_of(spec, {offer}, width);

    CHECK(block.num_rows == expected.ids.size());
    CHECK(block.width == width && !block.compacted && block.num_gradients == 1 && block.weight == offer.weight);
    CHECK(block.dtype == spec.storage || block.dtype == spec.accumulate);
    CHECK(!block.lent() || lend);
    if (block.lent()) CHECK(block.values == offer.values.data());
    const std::int64_t* const ids = block.ids.as<std::int64_t>();
    CHECK(std::equal(expected.ids.begin(), expected.ids.end(), ids));
    if (check_finite && gq::is_real(spec.storage)) {
      const std::size_t elements = block.num_rows * width;
      CHECK(block.finite == gq::all_finite(block.dtype, block.values, elements));
    } else {
      CHECK(block.finite);
    }
    const gq::Block* log[] = {&block};
    check_merged(spec, gq::merge_log(spec, log, 1, width, 1), expected, width);
    const std::size_t estimate = gq::distinct_bytes(spec, log, 1);  // Exact for so few.
    CHECK(estimate >= block.num_rows * (8 + width * gq::item_bytes(spec.storage)));
    CHECK(estimate <= block.num_rows * (8 + width * gq::item_bytes(spec.accumulate)));
  }
  check_pool();
  return 0;
}
