// The store's side of its journal on disk: what is not in it yet, and the waits that keep commits within its bound.
//
// One process writes the journal (store/journal.py); this is all that it and those who commit share. A writer compares
// what it has written with the words of all rows, so that a commit notes nothing anywhere. A ticket stands for a pass
// of the writer that begins after it was taken.

#include <algorithm>
#include <cstring>

#include "base/clock.h"
#include "base/deadline.h"
#include "base/errors.h"
#include "base/futex.h"
#include "store/client_lock.h"
#include "store/store.h"

namespace geartrain {
namespace {

// Until a ticket is served. Tickets wrap.
bool serves(uint32_t completed, uint32_t ticket) {
  return static_cast<int32_t>(completed - ticket) >= 0;
}

uint64_t slice_ns(const Deadline& deadline) {
  return std::min<uint64_t>(deadline.left_ns(), static_cast<uint64_t>(kLookEveryS * 1e9));
}

std::string directory_of(const JournalControl& journal) {
  return {journal.path, ::strnlen(journal.path, kJournalPathBytes)};
}

}  // namespace

void Store::set_journal(const std::string& path, bool full_is_error, uint64_t sync_ns) {
  ensure_client();
  JournalControl& journal = journal_control();
  if (path.empty() || path.size() >= kJournalPathBytes) {
    fail(ErrorKind::schema, "the path of a journal has 1 to ", kJournalPathBytes - 1, " bytes, found ", path.size());
  }
  Guard guard(*this);
  if (has_journal()) fail(ErrorKind::schema, "the store has a journal already, in ", directory_of(journal));
  std::memcpy(journal.path, path.data(), path.size());
  journal.path[path.size()] = 0;
  journal.sync_ns.store(sync_ns);
  journal.mode.store(static_cast<uint32_t>(full_is_error ? JournalMode::full_is_error : JournalMode::full_waits),
                     std::memory_order_release);
}

JournalChanges Store::journal_changes(uint64_t sequence, std::span<const uint32_t> generations,
                                      std::span<const uint64_t> times, bool rewritten) {
  ensure_client();
  const uint64_t capacity = header().capacity;
  if (generations.size() != capacity || times.size() != capacity) {
    fail(ErrorKind::schema, "a generation and a time of each of ", capacity, " rows are needed, found ",
         generations.size(), " and ", times.size());
  }
  JournalChanges found;
  const auto add = [&](uint32_t row, uint32_t generation) {
    found.rows.push_back(row);
    found.generations.push_back(generation);
    found.times.push_back(status()[row].inserted_at_ns.load(kRelaxed));
  };
  {
    Guard guard(*this);
    const Control& c = control();
    for (uint32_t row = c.order_tail; row != kNoRow; row = status()[row].previous) {
      if (found.rows.size() == capacity) fail_damaged("the order list is a circle through row", row);
      if (status()[row].sequence.load(kRelaxed) < sequence) break;
      add(row, generation_of(words()[row].load(kRelaxed)));
    }
    found.next_sequence = next_sequence();
    found.inserted = c.counters.inserted.load(kRelaxed);
    found.open = c.open_count;
  }
  std::reverse(found.rows.begin(), found.rows.end());
  std::reverse(found.generations.begin(), found.generations.end());
  std::reverse(found.times.begin(), found.times.end());
  // After the look at the new rows: what these have replaced is found gone.
  for (uint32_t row = 0; row < capacity; ++row) {
    if (generations[row] == 0) continue;
    if (generation_of(words()[row].load(std::memory_order_acquire)) != generations[row]) {
      found.gone.push_back(row);
    } else if (rewritten && times[row] != status()[row].inserted_at_ns.load(kRelaxed)) {
      add(row, generations[row]);
    }
  }
  return found;
}

uint32_t Store::await_journal_request(uint32_t seen, double timeout_s) const {
  check_usable();
  const JournalControl& journal = journal_control();
  const Deadline deadline = Deadline::after(timeout_s);
  for (;;) {
    const uint32_t requested = journal.requested.load(std::memory_order_acquire);
    if (requested != seen || deadline.passed() || calls_.must_end()) return requested;
    futex_wait(journal.requested, seen, slice_ns(deadline));
  }
}

void Store::journal_passed(uint32_t ticket, uint64_t synced_ns) {
  check_usable();
  JournalControl& journal = journal_control();
  journal.error.store(0);
  journal.synced_ns.store(synced_ns);
  journal.completed.store(ticket, std::memory_order_release);
  futex_wake(journal.completed);
}

void Store::journal_failed(uint32_t error) {
  check_usable();
  JournalControl& journal = journal_control();
  journal.error.store(error);
  futex_wake(journal.completed);
}

void Store::request_journal_priorities() {
  check_usable();
  JournalControl& journal = journal_control();
  journal.priorities.fetch_add(1);
  journal.requested.fetch_add(1);
  futex_wake(journal.requested);
}

bool Store::sync_journal(double timeout_s, uint32_t* error) {
  check_usable();
  JournalControl& journal = journal_control();
  const uint32_t ticket = journal.requested.fetch_add(1) + 1;
  futex_wake(journal.requested);
  const Deadline deadline = Deadline::after(timeout_s);
  for (;;) {
    const uint32_t completed = journal.completed.load(std::memory_order_acquire);
    if (serves(completed, ticket)) return true;
    const bool refuses = journal.mode.load() == static_cast<uint32_t>(JournalMode::full_is_error);
    const uint32_t broken = journal.error.load();
    if (deadline.passed() || (refuses && broken != 0)) {
      if (error != nullptr) *error = broken;
      return false;
    }
    if (calls_.must_end()) refuse_closed();
    futex_wait(journal.completed, completed, slice_ns(deadline));
  }
}

// Before rows are committed: what was committed longer ago than the bound must be on the disk.
void Store::admit_to_journal() const {
  JournalControl& journal = journal_control();
  const auto behind = [&] {
    const uint64_t synced = journal.synced_ns.load(), bound = journal.sync_ns.load(), now = monotonic_ns();
    return bound != 0 && synced != 0 && now > synced && now - synced > bound;
  };
  const bool refuses = journal.mode.load() == static_cast<uint32_t>(JournalMode::full_is_error);
  const Deadline deadline = Deadline::after(lock_timeout_s_);
  for (bool first = true;; first = false) {
    const uint32_t completed = journal.completed.load(std::memory_order_acquire);
    const uint32_t error = journal.error.load();
    if (error != 0 && refuses) refuse_journal(error, "", ". No row was committed");
    if (error == 0 && !behind()) return;
    if (first) count(journal.waits);
    if (calls_.must_end()) refuse_closed();
    if (deadline.passed()) refuse_journal(error, "", ". No row was committed");
    futex_wait(journal.completed, completed, slice_ns(deadline));
  }
}

// After rows were committed, removed or written in place: with a bound of 0 that is on the disk. False, with the disk's
// error or 0, where it is not.
bool Store::is_settled(uint32_t* error) {
  return journal_control().sync_ns.load() != 0 || sync_journal(lock_timeout_s_, error);
}

void Store::settle_journal(const char* what, bool durable) {
  if (!has_journal()) return;
  uint32_t error = 0;
  const bool settled = durable ? sync_journal(lock_timeout_s_, &error) : is_settled(&error);
  if (!settled) refuse_journal(error, message_of({"rows were ", what, ", but "}), "");
}

void Store::refuse_journal(uint32_t error, const std::string& before, const char* after) const {
  const JournalControl& journal = journal_control();
  const bool waited = journal.mode.load() != static_cast<uint32_t>(JournalMode::full_is_error);
  const std::string where = before + "the journal " + directory_of(journal);
  if (error == 0) {
    fail(ErrorKind::lock_timeout, where, " is behind its bound after ", lock_timeout_s_,
         " s: its disk is too slow, or the process that writes it is stopped", after);
  }
  const char* const why = std::strerror(static_cast<int>(error));
  if (!waited) fail(ErrorKind::no_space, where, " cannot be written: ", why, after);
  fail(ErrorKind::no_space, where, " cannot be written, for ", lock_timeout_s_, " s: ", why, after);
}

}  // namespace geartrain
