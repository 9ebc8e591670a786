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
      : store_(store),
        request_(request),
        steps_(request.window != 0 ? request.window : store.header().max_length),
        after_(request.from_first ? steps_ - 1 : std::min(request.after, steps_ - 1)),
        before_(steps_ - 1 - after_),
        at_end_(request.window != 0 && request.pad_left && !request.in_place) {
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
    const uint32_t last = length - 1, anchor = anchor_of(i, last), before = std::min(anchor, before_);
    const uint32_t count = before + 1 + std::min(after_, last - anchor);
    return {anchor - before, count, request_.in_place ? before_ - before : 0};
  }

  Window window_of(size_t i, uint32_t length) const {
    Window window = widest(i, length);
    if (window.count != 0 && (marks_ || request_.whole_episodes)) window = of_episode(i, length, window);
    if (at_end_ && length != 0) window.at = steps_ - window.count;
    return window;
  }

  const Store& store_;
  const FetchRequest& request_;
  const uint32_t steps_;           // of a row in the batch
  const uint32_t after_, before_;  // of these, behind the step that a window is told by, and before it
  const bool at_end_;              // what is missing is before the steps that are there
  EpisodeMarks marks_;

 private:
  // The step that a window is told by, of a row whose last one is `last`.
  uint32_t anchor_of(size_t i, uint32_t last) const {
    if (request_.ends.empty()) return request_.from_first ? 0 : last;
    return std::min(last, static_cast<uint32_t>(std::max(0, request_.ends[i])));
  }

  Window of_episode(size_t i, uint32_t length, Window window) const {
    const uint32_t row = request_.rows[i], anchor = anchor_of(i, length - 1);
    uint32_t begin = window.start, end = window.start + window.count - 1;
    if (request_.whole_episodes) {
      begin = marks_ ? marks_.begin(row, 0, anchor) : 0;
      end = begin + std::min(steps_, length - begin) - 1;
      if (marks_) end = marks_.end(row, begin, end);
    } else {
      begin = marks_.begin(row, begin, anchor);
      end = marks_.end(row, anchor, end);
    }
    return {begin, end + 1 - begin, request_.in_place ? window.at + (begin - window.start) : 0};
  }
};

}  // namespace geartrain
