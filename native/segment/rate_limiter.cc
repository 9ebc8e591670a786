#include "segment/rate_limiter.h"

#include <algorithm>

#include "base/clock.h"
#include "base/futex.h"

namespace geartrain {
namespace {

// Retries until it is admitted, or the time is over.
template <typename Try>
bool wait_until(RateLimiter& limiter, std::atomic<uint64_t>& waited_ns, double timeout_s, const Stopped& stopped,
                Try&& attempt) {
  if (attempt()) return true;
  const uint64_t began = monotonic_ns();
  const auto timeout_ns = static_cast<uint64_t>(std::clamp(timeout_s, 0.0, 1e9) * 1e9);
  bool admitted = false;
  limiter.waiting.fetch_add(1);
  for (uint64_t now = began; !admitted && now - began < timeout_ns; now = monotonic_ns()) {
    const uint32_t seen = limiter.changes.load();
    if ((admitted = attempt()) || (stopped && stopped())) break;
    futex_wait(limiter.changes, seen, timeout_ns - (now - began));
  }
  limiter.waiting.fetch_sub(1);
  waited_ns.fetch_add(monotonic_ns() - began, std::memory_order_relaxed);
  return admitted;
}

// How far inserts are ahead of the middle of the allowed range, in samples.
double lead(const RateLimiter& limiter, double inserts, double samples) {
  const double ratio = limiter.samples_per_insert.load();
  return ratio * inserts - samples - ratio * static_cast<double>(limiter.min_size.load());
}

}  // namespace

void set_limiter(RateLimiter& limiter, const RateLimiterSettings& settings, bool afresh) {
  limiter.samples_per_insert.store(settings.samples_per_insert);
  limiter.error_buffer.store(settings.error_buffer);
  limiter.min_size.store(settings.min_size);
  limiter.unit.store(settings.unit);
  if (afresh) {
    limiter.inserts.store(0);
    limiter.samples.store(0);
  }
  limiter.enabled.store(settings.enabled ? 1 : 0);
  announce(limiter);
}

bool admit_inserts(RateLimiter& limiter, uint64_t n, double timeout_s, const Stopped& stopped) {
  if (limiter.enabled.load(std::memory_order_relaxed) == 0) return true;
  const bool admitted = wait_until(limiter, limiter.insert_wait_ns, timeout_s, stopped, [&] {
    uint64_t inserts = limiter.inserts.load();
    for (;;) {
      // Samples only ever add to what inserts may do, so a slightly old count of them is on the safe side.
      const bool may = limiter.enabled.load() == 0 || limiter.samples_per_insert.load() <= 0 ||
                       inserts + n <= limiter.min_size.load() ||
                       lead(limiter, static_cast<double>(inserts + n), static_cast<double>(limiter.samples.load())) <=
                           limiter.error_buffer.load();
      if (!may) return false;
      if (limiter.inserts.compare_exchange_weak(inserts, inserts + n)) return true;
    }
  });
  // The rows are announced when they can be sampled.
  return admitted;
}

bool admit_samples(RateLimiter& limiter, uint64_t n, const Enough& enough, double timeout_s, const Stopped& stopped) {
  if (limiter.enabled.load(std::memory_order_relaxed) == 0) return true;
  const bool admitted = wait_until(limiter, limiter.sample_wait_ns, timeout_s, stopped, [&] {
    uint64_t samples = limiter.samples.load();
    for (;;) {
      const bool on = limiter.enabled.load() != 0;
      const bool may = !on || (enough(limiter.min_size.load()) &&
                               (limiter.samples_per_insert.load() <= 0 ||
                                lead(limiter, static_cast<double>(limiter.inserts.load()),
                                     static_cast<double>(samples + n)) >= -limiter.error_buffer.load()));
      if (!may) return false;
      if (limiter.samples.compare_exchange_weak(samples, samples + n)) return true;
    }
  });
  if (admitted) announce(limiter);
  return admitted;
}

void give_back(RateLimiter& limiter, uint64_t inserts, uint64_t samples) {
  if (limiter.enabled.load() == 0) return;
  const auto less = [](std::atomic<uint64_t>& count, uint64_t n) {
    uint64_t old = count.load();
    while (!count.compare_exchange_weak(old, old - std::min(old, n))) {
    }
  };
  less(limiter.inserts, inserts);
  less(limiter.samples, samples);
  announce(limiter);
}

void announce(RateLimiter& limiter) {
  limiter.changes.fetch_add(1);
  if (limiter.waiting.load() != 0) futex_wake(limiter.changes);
}

}  // namespace geartrain
