// Edge coverage of one execution, where the compiler counts it (g++ -fsanitize-coverage=trace-pc).
#pragma once

#include <cstdint>

namespace geartrain {

// Whether this program was compiled with it.
bool has_edge_coverage();
// Forgets what was counted.
void clear_edge_coverage();
// Whether an edge was taken since, or as often (1, 2, 3, 4-7, ... times), that no earlier call has seen.
bool found_new_edges();
// Edges seen so far.
uint64_t edges_seen();

}  // namespace geartrain
