/// Dense gradients, merged and compacted, against the model: one row with id 0 is the same sum.
#include "decode.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Bytes bytes(data, size);
  {
    const gq::Spec spec = decode_spec(bytes);
    const std::size_t elements = fuzz_widths[bytes.below(std::size(fuzz_widths))] * (1 + bytes.below(4));
    std::vector<Offer> offers;
    std::vector<gq::DenseBlock> blocks;
    for (std::size_t i = 1 + bytes.below(5); i > 0; --i) {
      Offer offer = decode_offer(bytes, spec, 0);
      offer.ids.assign(1, 0);
      offer.values.resize(elements * gq::item_bytes(spec.storage));
      for (unsigned char& byte : offer.values) byte = bytes.take<unsigned char>();
      offers.push_back(std::move(offer));
    }
    for (const Offer& offer : offers)
      blocks.push_back(gq::make_dense(spec, offer.values.data(), elements, offer.weight, bytes.flag(),
                                      bytes.flag() ? std::make_shared<int>(0) : nullptr));
    std::vector<const gq::DenseBlock*> log;
    for (const gq::DenseBlock& block : blocks) log.push_back(&block);
    const Expected expected = model_of(spec, offers, elements);
    const auto check = [&] {
      const auto count = static_cast<std::int64_t>(offers.size());
      const gq::Buffer out = gq::merge_dense(spec, log.data(), log.size(), elements, count);
      CHECK(same_values(spec.storage, out.bytes(), expected.values.data(), elements));
    };
    check();
    const std::size_t prefix = 1 + bytes.below(log.size());
    const gq::DenseBlock merged = gq::compact_dense(spec, log.data(), prefix);
    log.erase(log.begin(), log.begin() + static_cast<std::ptrdiff_t>(prefix));
    log.insert(log.begin(), &merged);
    check();
  }
  check_pool();
  return 0;
}
