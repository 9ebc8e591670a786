// Tasks: work that is done once per row, by whichever process claims it.
//
//   std::vector<ClaimedRow> rows = tasks.claim(task, {.most = 4});      // due rows, oldest first
//   TaskRow put{.row = rows[0].row, ..., .units = layout.place(...)};
//   tasks.begin(Write::put, task, {&put, 1});                           // a span that hangs on the row's word
//   ...                                                                 // bytes are copied to it without the lock
//   tasks.finish(Write::put, task, {&put, 1});                          // the task is done; rows become due for others
//
// A row is due for a task when the tasks that this one comes after are done. Rows come from inserts, which are the task
// number 0. When all tasks but the last are done the row is committed: it is drawn as rows of any store are, and freed
// by the draw that uses up its samples. Words and their states are segment.h's; what lies in spans is span_layout.h's.
//
// Fences. A claim is (row, generation, claim number): a write of a claim that was released, dropped or taken back,
// whose owner was taken for dead, or whose row is another by now changes nothing.
//
// Space. Where no span is free, an insert waits; it leaves a 16th of the region to tasks. A put or append first sets
// back rows that are newer than the oldest one that waits, not claimed and not finished, newest first: their tasks are
// to be done again. Where there is none and older rows wait too, the newest claim that waits is given up, if that frees
// room or its process may then do something that does. What the oldest row that waits needs is not taken by newer ones.
// So the oldest rows always come through. After the end of the inserts no task is done again that is done for all rows,
// since nobody may be left who does it.
//
// Death. What a dead process had claimed is due again; what it was writing is freed, and what it had appended stays
// where the task keeps it. After three deaths without an append or put a row is dropped.
//
// Limits. Rows in flight are counted from what is there: rows of inserts, under way or being written, rows that can be
// drawn, and of each client those that it has drawn for batches which are not finished. An insert waits while these and
// its own are more than the limit. The clock is the version of the policy that is trained. A row is stale whose version
// is known by a task and lies further behind the clock than the limit. It is ended where nobody holds it: when the
// clock advances, or when its last claim is put or given back.
// Batches that keep their rows. Such a batch takes the rows that it draws: the word of their last task has its step and
// their places. They stay, whoever dies, until free_taken(); taken() finds a batch again, and untake() gives one back
// that is not complete.
//
// Threads and processes: any; words change under the store's lock, 64 rows a hold. Waits are the caller's, on futexes
// (TaskFigures::changes, TaskTable::space_changes), which never tell more than that it is worth to look again.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "segment/span_heap.h"
#include "store/saved_records.h"
#include "store/span_layout.h"
#include "store/store.h"

namespace geartrain {

struct ClaimedRow {
  uint32_t row, generation;  // the key
  uint16_t claim;
};

// A row that an insert, put or append writes. Rows that cannot be written any more have span 0 after begin().
struct TaskRow {
  uint32_t row = kNoRow, generation = 0;
  uint16_t claim = 0;
  uint64_t units = 0;  // of its span; 0: it has none
  AxisLengths lengths{};
  uint32_t item = 0;  // of an append
  uint64_t span = 0;  // out: its first unit
  bool skipped = false;
};

enum class Write : uint8_t {
  put,      // all fields of a claimed row's task, which is done then
  append,   // more items of one axis of a claimed row
  rewrite,  // all fields of a task that is done
};

// A span of a chain.
struct ChainPart {
  uint64_t span, units;
  uint32_t item;
  uint8_t axis;  // 0: all fields of the task
  AxisLengths lengths;
};

class Tasks {
 public:
  Tasks(Store& store, std::shared_ptr<const TaskTable> checked, TaskTable* table, std::byte* spans,
        std::atomic<uint64_t>* words, std::atomic<uint64_t>* due);

  uint32_t count() const { return count_; }  // tasks, without the insert
  uint32_t last() const { return count_; }   // number of the last one; 0: there are none
  const TaskTable& described() const { return *described_; }
  TaskTable& table() const { return *table_; }
  const SpanHeap& heap() const { return heap_; }
  const SpanLayout& layout(uint32_t task) const { return layouts_[task]; }  // of its puts
  TaskWord word(uint32_t row, uint32_t task) const {
    return TaskWord::of(words(row)[task].load(std::memory_order_acquire));
  }
  std::atomic<uint64_t>* words(uint32_t row) const { return words_ + uint64_t{row} * (count_ + 1); }
  // The span of a word that readers read: the first of its chain that is filled; 0: none. Bounded, without the lock.
  uint64_t filled(const TaskWord& word) const;
  // Whether a row has this key, under way or committed. Without the lock.
  bool has_key(uint32_t row, uint32_t generation) const;
  // Items of each axis that is known by now, 0 for the others. False where the key is stale or the row changed
  // meanwhile.
  bool lengths(uint32_t row, uint32_t generation, AxisLengths* out) const;

  // --- inserts ------------------------------------------------------------------------------------------------

  // Takes rows and their spans, all or none; false where there is no room, for now. Throws no_space for what the region
  // could never hold.
  bool begin_insert(std::span<TaskRow> rows);
  // Rows that are filled become due, one by one. `generations`: of their keys.
  void finish_insert(std::span<const TaskRow> rows, const CommitValues& values, std::span<uint32_t> generations);
  void abandon_insert(std::span<const TaskRow> rows);
  // What a store without room has, for an error.
  std::string occupancy();

  // --- claims -------------------------------------------------------------------------------------------------

  struct Asked {
    size_t most = 1;         // rows
    uint64_t max_items = 0;  // of an axis, together; 0: no limit. One row may have more
    uint32_t axis = 0;       // counted from 1
    bool later = false;      // say_version() follows; else the rows have the clock's
  };
  std::vector<ClaimedRow> claim(uint32_t task, const Asked& asked);
  // Rows become due again; those that are not this process's by that claim are passed over. Returns how many were not.
  size_t release(uint32_t task, std::span<const ClaimedRow> rows);
  size_t drop(uint32_t task, std::span<const ClaimedRow> rows);
  // This client claims rows for peers: its death counts as a release of them.
  void claim_for_others();
  // Claims rows once more by the number of an earlier claim, where they are due and nobody has claimed them since.
  // 0: rows that nobody has claimed since they were loaded; the claim's number is then next_claim(0). done: that claim
  // has put the row. `version`: as in say_version().
  enum class Again : uint8_t { stale = 0, claimed = 1, done = 2 };
  std::vector<Again> claim_again(uint32_t task, std::span<const ClaimedRow> rows, int64_t version);
  // Whether each is still this process's by that claim. Without the lock.
  bool owns(uint32_t task, const ClaimedRow& row) const;
  // The version of the policy that works on claimed rows. What an earlier claim has left keeps its own, if that is
  // older.
  void say_version(uint32_t task, std::span<const ClaimedRow> rows, int64_t version);

  // --- writing ------------------------------------------------------------------------------------------------

  // Gives rows their spans. Rows that cannot be written any more are skipped. Returns how many of the rows, from the
  // first on, have been begun: fewer than all where there is no room for the next one for now (wait_for_space). Throws
  // no_space where it could never have any; schema where lengths of axes that other tasks set are not the row's, or the
  // row is another's.
  size_t begin(Write write, uint32_t task, std::span<TaskRow> rows, uint8_t axis = 0);
  // Rows that were filled take effect. Those that were lost meanwhile are skipped: their spans are freed. Rows have no
  // span afterwards, so that abandon() passes over those that are through.
  void finish(Write write, uint32_t task, std::span<TaskRow> rows);
  void abandon(uint32_t task, std::span<TaskRow> rows);
  // What was appended to a claimed row so far, in its order. Throws stale_claim.
  std::vector<ChainPart> chain(uint32_t task, const ClaimedRow& row);
  // For a row that has found no room: makes some, as above. made: begin() again. wait: for space. given_up: the claim
  // is not this process's any more, or was given up here. never: nothing but this row and what was inserted takes room.
  enum class Room : uint8_t { made, wait, given_up, never };
  Room make_room(uint32_t task, const TaskRow& row);
  void stop_waiting();  // for room, without having got it

  // --- limits: task_limits.cc -----------------------------------------------------------------------------------

  struct Limits {
    uint64_t in_flight = 0;             // rows; 0: no limit
    std::optional<uint64_t> max_stale;  // versions behind the clock
  };
  Limits limits() const;
  void set_limits(const Limits& limits);
  uint64_t in_flight() const;  // exact under the lock
  // Throws full for an insert of more rows than may be in flight.
  void check_in_flight(uint64_t rows) const;
  // How many more rows may be inserted now.
  uint64_t places_in_flight() const;
  // Batches of this client, of so many rows that the draw used up, are finished or given up.
  void finished(uint64_t rows);
  int64_t clock() const { return table_->clock.load(kRelaxed); }
  int64_t advance(int64_t version);  // the clock never goes back; returns it
  void set_clock(int64_t version);   // of a loaded state
  // Whether a row's version is further behind the clock than allowed. Without the lock.
  bool is_stale(uint32_t row) const;
  // --- rows that batches have taken -----------------------------------------------------------------------------

  struct TakenRow {
    uint32_t row, generation;
    uint32_t place;
  };
  // What the batch of a step has taken, by its places. Where two rows have one place both are there.
  std::vector<TakenRow> taken(uint64_t step) const;
  // They are as if they had never been drawn: selectable, at their places in the order of inserts. Returns how many.
  uint64_t untake(uint64_t step);
  // Frees the rows of all steps up to this one, which is told to be saved. Returns how many.
  uint64_t free_taken(uint64_t step);
  // All steps that have taken any. Without the lock.
  struct TakenStep {
    uint64_t step, rows;
    uint64_t units;  // of their spans
  };
  std::vector<TakenStep> taken_steps() const;
  // Whether nothing but the end of taken rows can bring as many selectable rows: none is under way, and no row is free,
  // or an insert has found no room; or the rows under way wait for room that none of them gives back.
  bool kept_alone_stop(uint64_t rows);

  // The rows that come first in the order of inserts, up to the first one that is under way: how many of them there
  // are, `most` at most, and a sequence that all rows before are among them.
  struct Complete {
    uint64_t rows = 0, before = 0;
  };
  Complete complete(uint64_t most);

  // --- what is saved: saved_parts.cc ----------------------------------------------------------------------------

  // Rows of which a part has changed since, and those parts; 0: all that is there. Returns what to ask for next.
  uint64_t changed(uint64_t since, std::vector<SavedRow>* rows, std::vector<SavedPart>* parts);
  // Copies parts that are done to where `offsets` says, `bytes` of each. Without the lock; ok[i] is 0 where part i has
  // changed, and its bytes are void.
  void copy_parts(std::span<const SavedPart> parts, std::span<const uint64_t> offsets, std::byte* out,
                  std::span<uint8_t> ok) const;
  // Fill a new store that no other process uses. begin_load() takes all rows, load_parts() gives them parts,
  // finish_load() makes rows of them: those that are there in the order of their sequences; rows that are not named are
  // new. Parts keep their change numbers. Throw schema for what contradicts itself, no_space where the spans are too
  // few.
  void begin_load();
  void load_parts(std::span<const SavedPart> parts, std::span<const uint64_t> offsets,
                  std::span<const std::byte> bytes);
  void finish_load(std::span<const SavedRow> rows, uint64_t next_sequence);
  // What is saved beside the rows, and the same of a store that was loaded. Counters are those of kCounters, figures
  // those of kFigures for each task.
  static constexpr std::pair<const char*, std::atomic<uint64_t> TaskTable::*> kCounters[] = {
      {"dropped", &TaskTable::dropped},
      {"given_up", &TaskTable::given_up},
      {"set_back", &TaskTable::set_back},
      {"revoked", &TaskTable::revoked},
      {"stale", &TaskTable::stale}};
  static constexpr std::pair<const char*, std::atomic<uint64_t> TaskFigures::*> kFigures[] = {
      {"done", &TaskFigures::done},
      {"released", &TaskFigures::released},
      {"deaths", &TaskFigures::deaths},
      {"set_back", &TaskFigures::set_back}};
  struct Restored {
    int64_t clock = 0;
    bool finished = false;
    uint64_t saved_before = 0, next_row = 0, passed_before = 0;
    Limits limits;
    std::vector<uint64_t> counters, figures;
  };
  void restore(const Restored& state);

  // --- waits --------------------------------------------------------------------------------------------------

  // Waits while `seen` is the number of changes, at most so long, and reclaims what dead processes had claimed where
  // nothing changes. Throws closed.
  void await_due(uint32_t task, uint32_t seen, double timeout_s);
  void await_space(uint32_t seen, double timeout_s);
  // Whether no row can become due for the task any more, as finish() was called and all rows are through.
  bool is_over(uint32_t task) const;  // takes the lock where it seems so
  // How many rows can be drawn from now on, however long one waits, as finish() was called; none if more may come.
  std::optional<uint64_t> rows_left();
  // No more rows are inserted: loops end when they have nothing to do any more.
  void end_inserts();

  // For who watches: of the task that lags, the oldest row that is claimed, and whose it is.
  struct Oldest {
    uint32_t row = kNoRow, slot = kNoClient;
    int32_t pid = 0;
    uint64_t inserted_at_ns = 0;
  };
  Oldest oldest_claim(uint32_t task);

  // --- for Store, under its lock --------------------------------------------------------------------------------

  void clear();                              // of a new segment
  void take_rows(std::span<uint32_t> rows);  // as many as are free
  bool freed(uint32_t row);                  // its spans and words; false where somebody is writing one still
  bool drop_locked(uint32_t row, uint32_t generation);  // a row under way, or taken
  void release_claims_of(uint32_t slot);                // of a client that is gone
  bool is_taken(uint32_t row) const { return count_ != 0 && word(row, count_).state == TaskState::taken; }
  // A committed row that is on no list any more and has no bit, and whose priority was this.
  void take(uint32_t row, const TakenWord& by, uint32_t priority);
  void drawn(uint64_t rows) {  // for the last time, by this client
    table_->unfinished[store_.client_slot_.load(kRelaxed)].fetch_add(static_cast<uint32_t>(rows), kRelaxed);
  }
  void begin_rebuild(std::span<const bool> alive);
  bool survives(uint32_t row) const;  // a row under way, in a rebuild
  void finish_rebuild(Store::Sums& sums);
  void end_rebuild() { rebuilding_ = false; }  // finished or not
  void audit(const std::function<void(const std::string&)>& wrong) const;
  void wake_all() const;

 private:
  // Who is to be woken once the lock is released.
  class Woken {
   public:
    explicit Woken(const Tasks& tasks) : tasks_(tasks) {}
    ~Woken();
    Woken(const Woken&) = delete;
    Woken& operator=(const Woken&) = delete;
    void task(uint32_t number) { numbers_ |= uint64_t{1} << (number - 1); }
    void space() { space_ = true; }

   private:
    const Tasks& tasks_;
    uint64_t numbers_ = 0;
    bool space_ = false;
  };
  struct Chain;  // a walk along the spans of a word, bounded
  static constexpr size_t kRowsAHold = 64;
  static constexpr uint32_t kFilled = 1;  // SpanHead::mark; of others the client that fills it, from bit 8 on

  TaskFigures& figures(uint32_t task) const { return table_->figures[task]; }
  const TaskRecord& record(uint32_t task) const { return described_->tasks[task]; }
  std::atomic<uint64_t>* due_words(uint32_t task) const { return due_ + task * due_stride_; }
  bool due_bit(uint32_t task, uint32_t row) const;
  void set_due(uint32_t task, uint32_t row, Woken& woken);
  void clear_due(uint32_t task, uint32_t row);
  uint64_t done_mask(uint32_t row) const;
  bool is_ready(uint32_t row, uint32_t task) const;  // what it comes after is done, and it is not
  void set_word(uint32_t row, uint32_t task, const TaskWord& word) const;
  SpanHead& head(uint64_t span) const;
  uint64_t sequence(uint32_t row) const;
  bool under_way(uint32_t row) const;
  std::atomic<int64_t>& version(uint32_t row, uint32_t task) const {
    return versions_[uint64_t{row} * (count_ + 1) + task];
  }
  std::atomic<uint64_t>& change(uint32_t row, uint32_t task) const {
    return changes_[uint64_t{row} * (count_ + 1) + task];
  }
  // Before its word is stored. Only the lock's holder counts.
  void note_change(uint32_t row, uint32_t task) const {
    const uint64_t number = table_->change.load(kRelaxed) + 1;
    table_->change.store(number, kRelaxed);
    change(row, task).store(number, std::memory_order_release);
  }
  SavedPart saved_part(uint32_t row, uint32_t task, uint32_t generation) const;
  void load_part(const SavedPart& part, std::span<const std::byte> bytes);
  void check_loaded(uint32_t row) const;
  int64_t known_version(uint32_t row) const;  // by its tasks; kNoVersion: by none
  int64_t version_of(uint32_t row) const;     // as the row shows it
  void settle_version(uint32_t row);
  void set_version(uint32_t row, uint32_t task, int64_t said);
  void forget_version(uint32_t row, uint32_t task);  // unless something is left of the task
  bool is_held(uint32_t row) const;
  bool end_if_stale(uint32_t row, Woken& woken);  // a row under way
  void end_stale_rows();
  bool may_rewrite(const TaskRow& row, uint32_t task) const;
  template <typename Act>
  uint64_t for_taken(uint64_t first, uint64_t last, Act&& act);
  void free_taken_row(uint32_t row);
  void locked_lengths(uint32_t row, AxisLengths* out) const;
  uint64_t take_span(uint32_t task, const TaskRow& from, uint8_t axis);
  void hang(uint64_t span, uint32_t task, const TaskRow& from, uint8_t axis);
  void fill(TaskRow& each);
  void end_fill();
  uint64_t kept_from_inserts() const;
  bool lives(uint32_t slot) const { return slot < alive_.size() && alive_[slot]; }
  // Stores a word without the spans of its chain that `lost` names, the others in their order and `first` in front, and
  // frees those. Returns what the word leads to then.
  template <typename Lost>
  uint64_t sift(uint32_t row, uint32_t task, TaskWord word, uint64_t first, Lost&& lost, Woken& woken);
  bool has_unfilled(uint32_t row) const;
  void no_claim(TaskWord& word, uint32_t task);
  void not_remaining(uint32_t task, Woken& woken);
  template <typename Act>
  size_t for_claimed(uint32_t task, std::span<const ClaimedRow> rows, const char* what, Act&& act);
  void unclaim(uint32_t row, uint32_t task, bool died, Woken& woken);
  void task_done(uint32_t row, uint32_t task, Store::Sums& sums, Woken& woken);
  void promote(uint32_t row, Store::Sums& sums);
  void set_back(uint32_t row, Woken& woken);
  void bring_to_front(uint32_t row, uint32_t task, uint64_t span);
  bool is_behind_a_filled_one(uint64_t chain, uint64_t span) const;
  void discard(TaskRow& each, uint32_t task, Woken& woken);
  bool can_be_set_back(uint32_t row) const;
  bool may_be_done_again(uint32_t row) const;
  bool has_task_spans(uint32_t row) const;
  template <typename Is>
  bool any_under_way(Is&& is) const;
  bool is_claimed(uint32_t row) const;
  bool helps_if_given_up(uint32_t row, uint64_t first) const;
  bool kept_alone_give_room();
  bool takes_all_room(uint32_t row) const;
  void drop_row(uint32_t row, Woken& woken);
  void passed_over(uint64_t first, uint64_t last);
  bool holds_claim(uint32_t task, const ClaimedRow& row) const;
  const SpaceWaiter* oldest_waiter() const;
  bool waits(const SpaceWaiter& waiter) const;
  template <typename Is>
  bool any_waits(Is&& is) const;
  bool has_room(uint64_t units);
  void register_waiter(uint64_t sequence, uint64_t units, bool claims);
  bool end_wait();
  template <typename Ended>
  bool end_waits(Ended&& ended);
  void reap_claims();
  void check_task(uint32_t task, const char* what) const;

  Store& store_;
  std::shared_ptr<const TaskTable> described_;  // as it was checked
  TaskTable* table_;
  std::atomic<uint64_t>* words_;
  std::atomic<uint64_t>* due_;
  uint64_t due_stride_;
  uint32_t count_;
  std::atomic<int64_t>* versions_;  // behind the words
  std::atomic<uint64_t>* changes_;  // behind the versions
  SpanHeap heap_;
  std::vector<uint32_t> latest_first_;  // tasks without the last one: those that come after others first
  std::vector<SpanLayout> layouts_;     // of each task's puts
  std::vector<uint32_t> columns_;       // fields of the insert that lie in no span
  uint64_t column_bytes_ = 0;           // of one row, unpadded
  bool rebuilding_ = false;
  std::array<bool, kMaxClients> alive_{};  // while it rebuilds
};

}  // namespace geartrain
