// Limits of stores with tasks: rows in flight, the clock, versions of rows, and the end of stale ones.

#include <algorithm>

#include "base/errors.h"
#include "store/tasks.h"

namespace geartrain {

// --- rows in flight -------------------------------------------------------------------------------------------

Tasks::Limits Tasks::limits() const {
  Limits found{.in_flight = table_->most_in_flight.load(kRelaxed), .max_stale = {}};
  const uint64_t most = table_->max_stale.load(kRelaxed);
  if (most != 0) found.max_stale = most - 1;
  return found;
}

void Tasks::set_limits(const Limits& limits) {
  store_.ensure_client();
  if (count_ == 0) fail(ErrorKind::schema, "the store has no tasks, and the limits are of rows that pass through some");
  {
    Woken woken(*this);
    Store::Guard guard(store_);
    table_->most_in_flight.store(limits.in_flight, kRelaxed);
    table_->max_stale.store(limits.max_stale ? *limits.max_stale + 1 : 0, kRelaxed);
    woken.space();
  }
  end_stale_rows();
}

// A row that was dropped while somebody fills a span of it is being written until they have noticed.
uint64_t Tasks::in_flight() const {
  uint64_t rows = store_.control().writing_count + table_->under_way.load(kRelaxed) + store_.committed_count();
  for (const std::atomic<uint32_t>& drawn : table_->unfinished) rows += drawn.load(kRelaxed);
  return rows;
}

void Tasks::check_in_flight(uint64_t rows) const {
  const uint64_t most = table_->most_in_flight.load(kRelaxed);
  if (most == 0 || rows <= most) return;
  fail(ErrorKind::full, rows, " rows are inserted together, and the limiter lets ", most,
       " rows be in flight; insert fewer at a time, or raise it by limiter.set(in_flight=)");
}

uint64_t Tasks::places_in_flight() const {
  const uint64_t most = table_->most_in_flight.load(kRelaxed);
  return most == 0 ? UINT64_MAX : most - std::min(most, in_flight());
}

void Tasks::finished(uint64_t rows) {
  if (rows == 0) return;
  store_.ensure_client();
  Woken woken(*this);
  Store::Guard guard(store_);
  std::atomic<uint32_t>& mine = table_->unfinished[store_.client_slot_.load(kRelaxed)];
  const uint32_t now = mine.load(kRelaxed);
  mine.store(now - static_cast<uint32_t>(std::min<uint64_t>(now, rows)), kRelaxed);
  woken.space();
}

// --- versions -------------------------------------------------------------------------------------------------

int64_t Tasks::known_version(uint32_t row) const {
  int64_t least = kNoVersion;
  for (uint32_t task = 1; task <= count_; ++task) {
    const int64_t its = version(row, task).load(kRelaxed);
    if (its != kNoVersion && (least == kNoVersion || its < least)) least = its;
  }
  return least;
}

int64_t Tasks::version_of(uint32_t row) const {
  const int64_t known = known_version(row);
  return known == kNoVersion ? version(row, 0).load(kRelaxed) : known;
}

void Tasks::settle_version(uint32_t row) {
  store_.status()[row].version.store(version_of(row), kRelaxed);
}

void Tasks::set_version(uint32_t row, uint32_t task, int64_t said) {
  std::atomic<int64_t>& its = version(row, task);
  const int64_t before = its.load(kRelaxed);
  its.store(before == kNoVersion ? said : std::min(before, said), kRelaxed);
  settle_version(row);
}

// --- the clock ------------------------------------------------------------------------------------------------

int64_t Tasks::advance(int64_t version) {
  store_.ensure_client();
  int64_t now = clock();
  while (now < version && !table_->clock.compare_exchange_weak(now, version)) {
  }
  if (now < version) end_stale_rows();
  return clock();
}

void Tasks::set_clock(int64_t version) {
  store_.ensure_client();
  table_->clock.store(version);
  end_stale_rows();
}

bool Tasks::is_stale(uint32_t row) const {
  const uint64_t most = table_->max_stale.load(kRelaxed);
  if (most == 0) return false;
  const int64_t known = known_version(row);
  return known != kNoVersion && known < clock() - static_cast<int64_t>(most - 1);
}

bool Tasks::is_held(uint32_t row) const {
  for (uint32_t task = 1; task < count_; ++task) {
    if (word(row, task).state == TaskState::claimed) return true;
  }
  return false;
}

bool Tasks::end_if_stale(uint32_t row, Woken& woken) {
  if (!is_stale(row) || is_held(row)) return false;
  drop_row(row, woken);
  table_->stale.fetch_add(1, kRelaxed);
  return true;
}

void Tasks::end_stale_rows() {
  const uint32_t capacity = static_cast<uint32_t>(store_.header().capacity);
  for (uint32_t first = 0; first < capacity && table_->max_stale.load(kRelaxed) != 0; first += kRowsAHold) {
    const uint32_t end = std::min<uint32_t>(capacity, first + kRowsAHold);
    bool any = false;  // without the lock: what is put or given back meanwhile is looked at by whoever does it
    for (uint32_t row = first; row < end && !any; ++row) {
      const RowState state = std::atomic_ref(store_.status()[row].state).load(kRelaxed);
      any = (state == RowState::under_way || state == RowState::committed) && is_stale(row);
    }
    if (!any) continue;
    Woken woken(*this);
    Store::Guard guard(store_);
    Store::Sums sums(store_);
    for (uint32_t row = first; row < end; ++row) {
      if (under_way(row)) {
        end_if_stale(row, woken);
      } else if (store_.status()[row].state == RowState::committed && is_stale(row)) {
        store_.retire(sums, row);
        store_.put_free_row(row);
        table_->stale.fetch_add(1, kRelaxed);
      }
    }
  }
}

}  // namespace geartrain
