#include "transport/providers/tried_threads.h"

#include <algorithm>

namespace geartrain {
namespace {

constexpr unsigned kNumbers[] = {1, 2, 3, 4, 6, 8, 12, 16};
constexpr unsigned kSamples = 3;
constexpr double kContended = 0.8, kIdle = 0.92;
constexpr double kAsFast = 1.05, kWorthOn = 1.25, kChanged = 1.5;
constexpr double kNew = 0.5;  // weight of a judgement among those before
constexpr uint32_t kLeastPause = 3, kMostPause = 20;
constexpr size_t kNear = 2;  // numbers that are neighbours

}  // namespace

TriedThreads::TriedThreads(unsigned begin, unsigned most) : pause_(kLeastPause), left_(kLeastPause) {
  for (const unsigned threads : kNumbers) {
    if (threads < most) numbers_[count_++].threads = threads;
  }
  numbers_[count_++].threads = most;
  while (at_ + 1 < count_ && numbers_[at_ + 1].threads <= begin) ++at_;
  kept_ = at_;
}

bool TriedThreads::usable(size_t number) const {
  return numbers_[number].rate != 0 && (number == 0 || numbers_[number].share >= kContended);
}

void TriedThreads::judge(uint64_t bytes, uint64_t took_ns, double share) {
  if (samples_ == 0) rate_ = share_ = 0;
  rate_ = std::max(rate_, static_cast<double>(bytes) / static_cast<double>(std::max<uint64_t>(took_ns, 1)));
  share_ = std::max(share_, share);
  if (++samples_ < kSamples) return;
  samples_ = 0;
  note(rate_, share_);
  if (at_ == kept_ && !usable(kept_)) return halve();
  double fastest = 0;
  for (size_t i = 0; i < count_; ++i) {
    if (usable(i)) fastest = std::max(fastest, numbers_[i].rate);
  }
  for (kept_ = 0; !usable(kept_) || numbers_[kept_].rate * kAsFast < fastest;) ++kept_;
  at_ = kept_;
  if (try_another()) return;
  if (left_ != 0) {
    --left_;
    return;
  }
  left_ = pause_ = std::min(pause_ + pause_ / 2 + 1, kMostPause);
  uint64_t oldest = UINT64_MAX;
  const size_t first = kept_ < kNear ? 0 : kept_ - kNear, last = std::min(count_, kept_ + kNear + 1);
  for (size_t i = first; i < last; ++i) {
    if (i == kept_ || numbers_[i].judged >= oldest || (i > kept_ && numbers_[kept_].share < kIdle)) continue;
    oldest = numbers_[i].judged;
    at_ = i;
  }
}

void TriedThreads::note(double rate, double share) {
  Number& here = numbers_[at_];
  here.judged = ++judgements_;
  const bool had_cores = at_ == 0 || here.share >= kContended, has_cores = at_ == 0 || share >= kContended;
  if (here.rate == 0) {
    here.rate = rate;
    here.share = share;
  } else if (had_cores == has_cores && rate < kChanged * here.rate && here.rate < kChanged * rate) {
    here.rate += kNew * (rate - here.rate);
    here.share = share;
    surprises_ = 0;
  } else if (at_ != kept_ || had_cores != has_cores || ++surprises_ == 2) {
    here.rate = rate;
    here.share = share;
    forget_others();
  }
}

void TriedThreads::forget_others() {
  for (size_t i = 0; i < count_; ++i) {
    if (i != at_ && i != kept_) numbers_[i].rate = 0;
  }
  surprises_ = 0;
  left_ = pause_ = kLeastPause;
}

// Below this number nothing is known of the machine as it is now; it itself is known to need more cores than there are.
void TriedThreads::halve() {
  const unsigned half = numbers_[kept_].threads / 2;
  while (kept_ > 0 && numbers_[kept_].threads > half) --kept_;
  at_ = kept_;
  for (size_t i = 0; i <= kept_; ++i) numbers_[i].rate = 0;
}

// The nearest number that has not been judged, in either direction, as far as that is worth while.
bool TriedThreads::try_another() {
  double fastest = 0;
  for (size_t i = 0; i < count_; ++i) {
    if (usable(i)) fastest = std::max(fastest, numbers_[i].rate);
  }
  const auto worth_on = [&](size_t number) { return usable(number) && numbers_[number].rate * kWorthOn >= fastest; };
  size_t up = kept_, down = kept_;
  while (up < count_ && worth_on(up) && numbers_[up].share >= kIdle) ++up;
  if (up < count_ && numbers_[up].rate == 0) {
    at_ = up;
    return true;
  }
  while (down > 0 && worth_on(down)) --down;
  if (numbers_[down].rate == 0) {
    at_ = down;
    return true;
  }
  return false;
}

}  // namespace geartrain
