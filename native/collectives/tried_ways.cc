#include "collectives/tried_ways.h"

#include <algorithm>
#include <bit>

namespace geartrain {
namespace {

constexpr uint32_t kCounted = 3;  // operations of a block at least, after the first
constexpr uint64_t kBlockNs = 2'000'000;
constexpr double kWorth = 0.9, kFarWorse = 1.4;
constexpr uint64_t kLeastBetweenTrialsNs = 200'000'000, kMostBetweenTrialsNs = 60'000'000'000;
constexpr uint64_t kLeastBetweenTrials = 250;

Way other_than(Way way) {
  return way == Way::rings ? Way::reading : Way::rings;
}

}  // namespace

void TriedWays::judge(Way way, uint64_t took_ns) {
  if (way != now_) return;
  if (first_ != 0) {
    --first_;
    return;
  }
  if (left_ns_ != 0) {
    left_ns_ -= std::min({left_ns_, took_ns, kLeastBetweenTrialsNs / kLeastBetweenTrials});
    return;
  }
  if (samples_++ == 0) {
    best_ns_ = UINT64_MAX;
    spent_ns_ = 0;
    return;
  }
  best_ns_ = std::min(best_ns_, took_ns);
  spent_ns_ += took_ns;
  if (samples_ <= kCounted || spent_ns_ < kBlockNs) return;
  samples_ = 0;
  const bool trying = now_ != kept_;
  judged_ns_[trying ? 1 : 0][turn_] = best_ns_;
  now_ = other_than(now_);
  if (!trying) return;
  if (turn_ == 0 && static_cast<double>(judged_ns_[1][0]) > kFarWorse * static_cast<double>(judged_ns_[0][0])) {
    return end_trial(false);
  }
  if (++turn_ < kTurns) return;
  for (auto& judged : judged_ns_) std::sort(judged.begin(), judged.end());
  end_trial(static_cast<double>(judged_ns_[1][kTurns / 2]) < kWorth * static_cast<double>(judged_ns_[0][kTurns / 2]));
}

void TriedWays::end_trial(bool changes) {
  if (changes) kept_ = other_than(kept_);
  now_ = kept_;
  turn_ = 0;
  pause_ns_ = changes ? kLeastBetweenTrialsNs : std::clamp(2 * pause_ns_, kLeastBetweenTrialsNs, kMostBetweenTrialsNs);
  left_ns_ = pause_ns_;
}

std::optional<size_t> AgreedWays::size_of(const Shape& shape) {
  const uint64_t bytes = shape.wire_bytes();
  const bool scatters = shape.collective == Collective::reduce_scatter;
  if (bytes < kLeastTried || shape.wire != shape.dtype || (shape.collective != Collective::all_reduce && !scatters)) {
    return std::nullopt;
  }
  const auto size = static_cast<size_t>(std::bit_width(bytes / kLeastTried) - 1);
  return std::min(size, kSizes - 1) + (scatters ? kSizes : 0);
}

Way AgreedWays::begin(const Shape& shape, bool readable) {
  const std::optional<size_t> size = size_of(shape);
  if (!size) return Way::rings;
  const Way now = readable ? next_[*size] : Way::rings;
  next_[*size] = readable ? tried_[*size].now() : Way::rings;
  return now;
}

uint32_t AgreedWays::word(const Shape& shape) const {
  const std::optional<size_t> size = size_of(shape);
  return size ? 1 + static_cast<uint32_t>(next_[*size]) : 0;
}

void AgreedWays::judge(const Shape& shape, Way way, uint64_t took_ns) {
  if (const std::optional<size_t> size = size_of(shape)) tried_[*size].judge(way, took_ns);
}

Way AgreedWays::follow(const Shape& shape, uint64_t operation) const {
  const std::optional<size_t> size = size_of(shape);
  if (!size) return Way::rings;
  // Rank 0 may be ahead: what it says with this operation is for the next one.
  const auto& [last, before] = heard_[*size];
  return last.operation < operation ? last.next : before.next;
}

void AgreedWays::heard(const Shape& shape, uint64_t operation, uint64_t word) {
  const std::optional<size_t> size = size_of(shape);
  if (!size || word == 0) return;
  auto& [last, before] = heard_[*size];
  before = last;
  last = {operation, word == 2 ? Way::reading : Way::rings};
}

}  // namespace geartrain
