// Importance weights of prioritized replay, from the probabilities of drawn rows.
#pragma once

#include <cstdint>
#include <span>

namespace geartrain {

// (probability * count) ** -beta, scaled so that the largest is 1, that of `lowest` included where it is above 0. Each
// weight depends on its own probability and on the largest alone, to the bit, in whichever form the CPU computes it:
// about 3 ns each. Within 2 units in the last place of the exact value before scaling.
void importance_weights(std::span<const double> probability, uint64_t count, double beta, double lowest,
                        std::span<double> weights);

// Forces "avx512", "avx2" or "portable", for tests; false when this machine does not have it.
bool set_power_kernel(const char* name);

}  // namespace geartrain
