#include "selection/draw_tuning.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>

#include "base/clock.h"
#include "base/errors.h"
#include "segment/descend.h"

namespace geartrain {
namespace {

constexpr int kPiecesOfEach = 12;    // the first ones find cold caches, and others are interrupted
constexpr double kWorthwhile = 0.9;  // of the usual candidate's time

struct Tuned {
  std::mutex mutex;
  std::vector<DrawTuning::Candidate> candidates;
  const char* because = nullptr;
  int begun = 0;
  std::atomic<bool> chosen{false};
  std::atomic<size_t> in_flight{kUsualInFlight};

  void list() {
    const char* const usual = descend_kernel();
    candidates = {{usual, kUsualInFlight}};
    for (const char* form : {"avx512", "avx2"}) {
      if (std::strcmp(form, usual) != 0 && has_descend_kernel(form)) candidates.push_back({form, kUsualInFlight});
    }
    for (const size_t in_flight : {size_t{16}, size_t{32}, size_t{128}}) candidates.push_back({usual, in_flight});
  }
  void choose(const DrawTuning::Candidate& candidate, const char* why) {
    set_descend_kernel(candidate.form);
    in_flight.store(candidate.in_flight, std::memory_order_relaxed);
    because = why;
    chosen.store(true, std::memory_order_release);
  }
};

Tuned& tuned() {
  static auto* of_process = new Tuned();  // never deleted: threads may draw while the process ends
  return *of_process;
}

}  // namespace

size_t DrawTuning::in_flight() {
  return tuned().in_flight.load(std::memory_order_relaxed);
}

DrawTuning::Trial DrawTuning::begin_trial() {
  Tuned& all = tuned();
  if (all.chosen.load(std::memory_order_acquire)) return {};
  const std::unique_lock lock(all.mutex, std::try_to_lock);  // held by another thread's trial, or by one before a fork
  if (!lock || all.chosen.load(std::memory_order_relaxed)) return {};
  if (all.candidates.empty()) all.list();
  const int next = all.begun++ % static_cast<int>(all.candidates.size());
  set_descend_kernel(all.candidates[next].form);
  return {next, all.candidates[next].in_flight, monotonic_ns()};
}

void DrawTuning::end_trial(const Trial& trial) {
  const double ns_per_draw = static_cast<double>(monotonic_ns() - trial.began_ns) / kPiece;
  Tuned& all = tuned();
  const std::unique_lock lock(all.mutex, std::try_to_lock);
  const auto at = static_cast<size_t>(trial.candidate);
  if (!lock || all.chosen.load(std::memory_order_relaxed) || at >= all.candidates.size()) return;
  double& best = all.candidates[at].ns_per_draw;
  if (best == 0 || ns_per_draw < best) best = ns_per_draw;
  if (all.begun < kPiecesOfEach * static_cast<int>(all.candidates.size())) return;
  const Candidate& usual = all.candidates.front();
  const Candidate* chosen = &usual;
  for (const Candidate& other : all.candidates) {
    if (other.ns_per_draw != 0 && other.ns_per_draw < kWorthwhile * usual.ns_per_draw &&
        other.ns_per_draw < chosen->ns_per_draw) {
      chosen = &other;
    }
  }
  all.choose(*chosen, "measured");
}

DrawTuning::Choice DrawTuning::choice() {
  Tuned& all = tuned();
  const std::unique_lock lock(all.mutex, std::try_to_lock);
  const bool is_chosen = all.chosen.load(std::memory_order_acquire);
  return {{descend_kernel(), in_flight()},
          is_chosen ? all.because : "not measured yet",
          lock ? all.candidates : std::vector<Candidate>()};
}

void DrawTuning::forget() {
  Tuned& all = tuned();
  const std::lock_guard lock(all.mutex);
  all.candidates.clear();
  all.begun = 0;
  all.in_flight.store(kUsualInFlight, std::memory_order_relaxed);
  all.chosen.store(false, std::memory_order_release);
}

}  // namespace geartrain
