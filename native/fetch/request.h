// Request: which rows of a store are fetched, which steps of them, and where they go.
//
// Windows. A window of W steps that is told by step t holds the row's steps among t - (W - 1 - after) .. t + after and
// nothing later (windows.h). What is missing is zero and false in the mask: before the steps (pad_left), after them, or
// on both sides, so that step t has the same place in all windows (in_place). With `within_episodes` it holds of them,
// where rows hold several episodes, those of step t's; with `whole_episodes` it begins where that episode does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "fetch/windows.h"

namespace geartrain {

// Where one field of the batch goes: contiguous, (rows, window or max_length, step...) or (rows, block...). With
// `steps` (rows, of these steps..., step...).
struct FetchField {
  uint32_t field;
  std::byte* out;
  const FieldSteps* steps = nullptr;
};

struct FetchRequest {
  std::span<const uint32_t> rows;
  std::span<const uint32_t> generations;  // as keys have them
  std::span<const FetchField> fields;
  uint32_t window = 0;  // steps; 0: whole rows
  bool pad_left = true;
  std::span<const int32_t> ends;  // the step that each window is told by; empty: the row's last step
  bool from_first = false;        // `ends` are first steps; empty: the row's first step
  uint32_t after = 0;             // steps behind `ends`, unless they are first steps
  bool in_place = false;
  bool within_episodes = false;
  bool whole_episodes = false;  // from_first and within_episodes
  // Where in the fields' outputs each row goes, in rows; empty: one after the other. `torn` and the other metadata
  // below are in the order of `rows` all the same.
  std::span<const uint32_t> places;
  unsigned threads = 1;
  // Filled for every row; all but `torn` may be empty.
  std::span<uint8_t> torn;     // 1: the key is stale or the row changed during the copy
  std::span<uint8_t> mask;     // (rows, window or max_length): 1 for a real step
  std::span<int32_t> starts;   // first step of the row that the batch holds
  std::span<int32_t> lengths;  // of the whole row
  std::span<int64_t> versions;

  // The windows of a plan, told by `ends`.
  void windows_of(const WindowPlan& plan, bool left) {
    window = plan.length;
    from_first = plan.from_first;
    after = plan.after;
    in_place = plan.in_place;
    pad_left = left;
    whole_episodes = plan.of_episodes();
  }
};

// Memory for what a request tells of its rows.
struct RowMetadata {
  RowMetadata(size_t rows, size_t steps)
      : torn(rows), mask(rows * steps), starts(rows), lengths(rows), versions(rows) {}
  void take(FetchRequest* request) {
    request->torn = torn;
    request->mask = mask;
    request->starts = starts;
    request->lengths = lengths;
    request->versions = versions;
  }

  std::vector<uint8_t> torn, mask;
  std::vector<int32_t> starts, lengths;
  std::vector<int64_t> versions;
};

}  // namespace geartrain
