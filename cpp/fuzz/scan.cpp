/// The scans: ids copied and judged as ascending, their range, values copied and judged as finite.
#include "decode.hpp"

using namespace gradquorum;  // For GRADQUORUM_DISPATCH.

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Bytes bytes(data, size);
  gq::Spec spec = decode_spec(bytes);
  const std::size_t kind = bytes.below(6);
  const std::size_t count = bytes.below(200);
  std::vector<std::int64_t> ids;
  for (std::size_t i = 0; i < count; ++i) ids.push_back(decode_id(bytes, kind));
  if (bytes.flag()) std::sort(ids.begin(), ids.end());

  std::vector<std::int64_t> copy(count);
  const bool ascending = GRADQUORUM_DISPATCH(copy_ids(ids.data(), count, copy.data()));
  CHECK(copy == ids);
  bool expected = true;
  for (std::size_t i = 1; i < count; ++i) expected = expected && ids[i - 1] < ids[i];
  CHECK(ascending == expected);
  if (count != 0) {
    std::int64_t low = 0;
    std::int64_t high = 0;
    GRADQUORUM_DISPATCH(range_of(ids.data(), count, low, high));
    CHECK(low == *std::min_element(ids.begin(), ids.end()) && high == *std::max_element(ids.begin(), ids.end()));
  }

  const std::size_t item = gq::item_bytes(spec.storage);
  const std::size_t elements = bytes.below(100);
  std::vector<unsigned char> from(elements * item);  // Of its very size: reading past its end is seen.
  for (unsigned char& byte : from) byte = bytes.take<unsigned char>();
  std::vector<unsigned char> to(from.size());
  bool finite = true;
  for (std::size_t i = 0; i < elements; ++i) {
    double value = 0;
    switch (spec.storage) {
      case gq::DType::f16: value = gq::half_to_float(get<gq::F16>(from.data(), i)); break;
      case gq::DType::bf16: value = gq::bfloat_to_float(get<gq::BF16>(from.data(), i)); break;
      case gq::DType::f32: value = get<float>(from.data(), i); break;
      case gq::DType::f64: value = get<double>(from.data(), i); break;
      default: break;
    }
    finite = finite && std::isfinite(value);
  }
  CHECK(gq::copy_values(spec, from.data(), to.data(), from.size(), true) == finite);
  CHECK(to == from);
  CHECK(gq::all_finite(spec.storage, from.data(), elements) == finite);
  check_pool();
  return 0;
}
