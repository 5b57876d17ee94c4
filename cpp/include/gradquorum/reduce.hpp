/// What a sum is divided by.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gradquorum/dtype.hpp"
#include "gradquorum/tasks.hpp"

namespace gradquorum {

/// Sum of the weights, one after the other in log order.
template <class B>
double total_weight(const B* const* blocks, std::size_t num_blocks) {
  double total = 0.0;
  for (std::size_t b = 0; b < num_blocks; ++b) total += blocks[b]->weight;
  return total;
}

/// A weight rounded to the accumulate type.
inline double round_weight(const Spec& spec, double weight) {
  return spec.accumulate == DType::f32 ? static_cast<double>(static_cast<float>(weight)) : weight;
}

/// The denominator of a reduction for a round.
inline void set_denominator(const Spec& spec, std::int64_t num_gradients, double weight, Divide& divide,
                            std::int64_t& count, double& number) {
  switch (spec.reduction) {
    case Reduction::sum: divide = Divide::none; break;
    case Reduction::mean: divide = Divide::by_touched; break;
    case Reduction::mean_by_count:
      divide = Divide::by_number;
      count = num_gradients;
      break;
    case Reduction::mean_by_weight:
      divide = Divide::by_number;
      number = round_weight(spec, weight);
      break;
  }
}

}  // namespace gradquorum
