// Row windows: which steps of its rows a request reads, and where in the batch they stand (request.h has the rules).
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "fetch/episodes.h"
#include "fetch/request.h"
#include "store/store.h"

namespace geartrain {

// A base of what goes through a request's rows.
class RowWindows {
 protected:
  // The steps [start, start + count) of a row go to [at, at + count) of the batch.
  struct Window {
    uint32_t start, count, at;
  };

  RowWindows(const Store& store, const FetchRequest& request)
      : store_(store), request_(request), steps_(request.window != 0 ? request.window : store.header().max_length) {
    if (request.within_episodes && request.window != 0) marks_ = store.episode_marks();
  }

  // As it is now; a row's window and its copy go by one reading of it.
  uint32_t length_of(uint32_t row) const {
    // Acquire: an open row's steps are written before they are counted.
    return std::min(store_.status()[row].length.load(std::memory_order_acquire), store_.header().max_length);
  }

  // Without marks of episodes.
  Window widest(size_t i, uint32_t length) const {
    if (request_.window == 0 || length == 0) return {0, length, 0};
    const uint32_t last = length - 1;
    const auto at = [&](uint32_t otherwise) {
      return request_.ends.empty() ? otherwise : std::min(last, static_cast<uint32_t>(std::max(0, request_.ends[i])));
    };
    const uint32_t start = request_.from_first ? at(0) : 0, end = request_.from_first ? 0 : at(last);
    const uint32_t count = std::min(steps_, request_.from_first ? length - start : end + 1);
    return {request_.from_first ? start : end + 1 - count, count, 0};
  }

  Window window_of(size_t i, uint32_t length) const {
    Window window = widest(i, length);
    if (window.count != 0 && (marks_ || request_.whole_episodes)) {
      const uint32_t row = request_.rows[i], end = window.start + window.count - 1;
      if (request_.whole_episodes) {
        window.start = marks_ ? marks_.begin(row, 0, window.start) : 0;
        const uint32_t last = window.start + std::min(steps_, length - window.start) - 1;
        window.count = (marks_ ? marks_.end(row, window.start, last) : last) + 1 - window.start;
      } else if (request_.from_first) {
        window.count = marks_.end(row, window.start, end) + 1 - window.start;
      } else {
        window.start = marks_.begin(row, window.start, end);
        window.count = end + 1 - window.start;
      }
    }
    if (request_.window != 0 && request_.pad_left && length != 0) window.at = steps_ - window.count;
    return window;
  }

  const Store& store_;
  const FetchRequest& request_;
  const uint32_t steps_;  // of a row in the batch
  EpisodeMarks marks_;
};

}  // namespace geartrain
