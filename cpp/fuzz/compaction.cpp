/// Compactions of prefixes, again and again: the bits of the merge stay the same.
#include "decode.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Bytes bytes(data, size);
  {
    FuzzLog log(bytes);
    const std::size_t times = 1 + bytes.below(3);
    for (std::size_t i = 0; i < times; ++i) {
      log.compact(1 + bytes.below(log.blocks.size()));
      if (bytes.flag()) {  // Gradients go on coming meanwhile.
        log.offers.push_back(decode_offer(bytes, log.spec, log.width));
        log.blocks.push_back(block_of(log.spec, log.offers.back(), log.width, false));
      }
      log.check();
    }
  }
  check_pool();
  return 0;
}
