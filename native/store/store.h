// Store: a shard of rows in a segment. Allocate, write in place, commit; read without locks; survive any process's
// death.
//
//   uint32_t row;
//   store->allocate({&row, 1});                      // a block in every column, owned by this process
//   std::memcpy(store->block(field, row), ...);      // in place
//   store->commit({&row, 1}, {.lengths = {&t, 1}});  // selectable from here on
//
// An episode in progress can be selectable too: publish() instead of commit(), extend() as steps are added,
// seal() at its end.
//
// Processes and threads. Any number of both may use one segment at once; every call here is thread-safe. Calls that
// change rows take the segment's lock for a few hundred nanoseconds per row. update_priorities takes no lock (except
// with the lowest_priority remover, whose order it changes, and with max_times_sampled).
//
// Closing. A thread that uses a handle which another thread may close holds a Store::Call meanwhile, over all of one
// piece of work: rows that it allocates, fills and commits within one Call stay its own. close() lets no call begin any
// more (they throw closed), ends the waits of those in flight (for the lock, the limiter, the gate: they throw closed
// within kLookEveryS), waits for their end, and only then leaves. A closed handle refuses everything; what it is
// (header(), fields()) and views of the memory stay readable. Reads of one number need no Call: the memory is mapped
// for as long as the handle exists.
//
// Death. The lock is robust: the next process to take it after its holder died repairs what was left
// half done. Rows a dead process was writing are reclaimed by the next process that notices: on joining, on running out
// of free rows, or on reap(). Committed rows are never lost while the host lives; rows that a dead process was
// extending are sealed as they are, their episodes counted again. Sums of priorities that a dead process left half
// changed are set right by whoever draws next (repair_dead_updates), or by any of these.
//
// Fork. A child may go on using the store: it becomes a client of its own on first use. Rows that were being
// written at the fork stay the parent's, and so do calls in flight in other threads. A handle that was closed is closed
// in the child, and so is one whose file the child may not open again. What a child does not use it never joins.
//
// Exit. exit() closes every handle of the process that is still open, calls in flight included (open_stores.h). After
// _exit() and signals others find the process dead.
//
// Descriptors. A program may close the segment's descriptor by mistake: the lease is kept by the mapping, and nobody is
// judged dead by what the number means then (shared_file.h).
//
// Deadlines. A lock not acquired within StoreOptions::lock_timeout_s is an Error(lock_timeout): its holder is stopped.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/lifetime.h"
#include "base/shared_file.h"
#include "segment/segment.h"
#include "segment/sum_tree.h"
#include "segment/validate.h"
#include "selection/episode_marks.h"
#include "selection/row_repeats.h"
#include "store/open_stores.h"
#include "store/row_values.h"
#include "store/status_table.h"

namespace geartrain {

class Tasks;

constexpr auto kRelaxed = std::memory_order_relaxed;

inline void count(std::atomic<uint64_t>& counter, uint64_t n = 1) {
  if (n != 0) counter.fetch_add(n, kRelaxed);
}

// How to join a segment that is already there.
struct AttachOptions {
  bool adopt = false;      // join although the processes that used it died
  bool read_only = false;  // read, leave no trace: no client slot, no repair, nobody waits for it
  double lock_timeout_s = 10.0;
  Trust trust = Trust::user;  // who may write to the file
};

class Store final : public OpenStore {
 public:
  static std::unique_ptr<Store> create(const std::string& name, const std::vector<FieldSpec>& fields,
                                       const StoreOptions& options);
  // Throws as open_shared_file and checked_geometry; missing, stale_store; corrupt where lists are damaged: `adopt` has
  // them rebuilt from the rows, once no process uses the segment.
  static std::unique_ptr<Store> attach(const std::string& name, const AttachOptions& options);
  // Closes the handle. A thread that must not wait with a lock of its own (Python's) has `closer` do it.
  ~Store();
  static void set_closer(void (*closer)(Store&));
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  // A piece of work on a handle that other threads may close: close() waits for its end. Costs two atomic additions.
  // Throws closed. Neither forks nor closes the handle meanwhile.
  class Call {
   public:
    explicit Call(const Store& store) : store_(store) {
      if (!store.calls_.enter()) store.check_open();
    }
    ~Call() {
      if (within_) store_.calls_.leave();
    }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

    // act() outside of the call, where any thread may close the handle. Throws what it throws, and closed.
    template <typename Act>
    auto paused(Act&& act) {
      struct Pause {
        Call& call;
        explicit Pause(Call& of) : call(of) {
          call.within_ = false;
          call.store_.calls_.leave();
        }
        ~Pause() { call.within_ = call.store_.calls_.enter(); }
      };
      auto made = [&] {
        const Pause pause(*this);
        return std::forward<Act>(act)();
      }();
      if (!within_) store_.check_open();
      return made;
    }
    // False where the handle was closed during a pause.
    bool within() const { return within_; }

   private:
    const Store& store_;
    bool within_ = true;
  };

  // Waits for the calls in flight, frees rows being written and leaves. The last client to leave in an orderly way
  // removes the name, unless the store persists. With `keep` it stays as it is, for a process that adopts it. Views of
  // the memory stay valid as long as a reference to mapping() exists. Of several threads that close a handle one
  // leaves, and the others wait for it. Throws lock_timeout; the handle is closed all the same, and counts as dead.
  void close(bool keep = false);
  // Clients that leave this handle leave the segment in place: a job that lost a process is restarted and adopts it.
  void keep_segment() { keep_ = true; }
  // Completes a data set. What is in it goes to its disk first, then the mark that it was left in good order: whoever
  // opens it finds it whole, also where every process is killed from here on. Who opens it for writing takes the mark
  // away before anything else. This handle changes nothing any more, and is a process of the store until it is closed.
  // Throws full where rows are being written or another process has it open.
  void seal_segment();
  bool is_closed() const { return calls_.closed(); }
  // Throws closed.
  void check_open() const {
    if (is_closed()) refuse_closed();
  }
  bool unlink();

  // --- rows: write.cc, priorities.cc, sample_counts.cc, evict.cc ----------------------------------------------------

  // Takes rows.size() blocks: free ones first, then victims of the remover. All or nothing. Throws full when too
  // many are being written.
  void allocate(std::span<uint32_t> rows);

  // Makes rows that this process allocated selectable. Everything is checked before anything is changed, and all of
  // them are or none is, also where the process is killed meanwhile.
  // Returns their odd generations. Throws schema (length, priority), stale_key (not this process's row).
  void commit(std::span<const uint32_t> rows, const CommitValues& values, std::span<uint32_t> generations);

  // As commit, but the rows stay this process's to extend. Their fields without time must not be changed any more, nor
  // steps below the length. The remover skips them. Throws full when no more rows may be kept, schema in a
  // store with max_times_sampled.
  void publish(std::span<const uint32_t> rows, const CommitValues& values, std::span<uint32_t> generations);
  // Sets the row's length; the steps are in its blocks already. Throws schema (shorter than it was, or too long),
  // stale_key (not a row that this process extends).
  void extend(uint32_t row, uint32_t length) { extend({&row, 1}, {&length, 1}); }
  // Of several rows, under one lock; all are checked before any is changed. `priorities` are those of the steps that
  // are new, where the store keeps any; empty: new_priority().
  void extend(std::span<const uint32_t> rows, std::span<const uint32_t> lengths,
              std::span<const double> priorities = {});
  // Completes the rows: they take their place as the newest.
  void seal(std::span<const uint32_t> rows);

  // Publishes, commits, extends, seals and abandons under one lock: what any of these would refuse is refused before
  // anything is changed. Rows that are published and committed are so together, as for commit.
  void apply(const RowChanges& changes);
  // Writes new contents into committed rows, by key, in place: of each field without time its value, of the others the
  // steps [starts[i], starts[i] + lengths[i]) of the row, as far as it goes. Empty: from the first step on, as many as
  // there are in the source. Keys stay valid; whoever copies such a row meanwhile copies it again. Rows that are stale,
  // or that their writer still extends, are skipped; returns how many. The lock is held for kRewritePiece bytes or one
  // row at a time; a process killed inside costs the row it was at. Throws schema (fields, sizes, a start behind the
  // longest row; a segment without content numbers).
  uint64_t rewrite(std::span<const uint32_t> rows, std::span<const uint32_t> generations,
                   std::span<const FieldSource> fields, std::span<const uint32_t> starts,
                   std::span<const uint32_t> lengths);

  // Commit's checks of the values for n rows, for callers that validate before they write.
  void check_values(size_t n, const CommitValues& values) const;

  // Zeroes a block of a row that this process is writing, without the lock. Throws stale_key for any other row.
  void clear_block(uint32_t field, uint32_t row) const;

  // Frees rows that this process allocated and did not commit. When the lock cannot be acquired this throws
  // lock_timeout as ever, but the rows are not lost: the next allocate frees them.
  void abandon(std::span<const uint32_t> rows);

  // Sets priorities by key; keys whose row no longer exists are counted and skipped. Returns how many were.
  uint64_t update_priorities(std::span<const uint32_t> rows, std::span<const uint32_t> generations,
                             std::span<const double> priorities);

  // Of stores with priorities of steps, which update_priorities refuses: sets those of steps, by key. Throws schema
  // also for a step that no row can have, and where the store keeps priorities of rows. One thread of a process at a
  // time.
  uint64_t update_step_priorities(std::span<const uint32_t> rows, std::span<const uint32_t> generations,
                                  std::span<const uint32_t> steps, std::span<const double> priorities);

  // Raises all priorities to a power, max_priority() as well; a pass over the words. Without the lock, except with the
  // lowest_priority remover; with max_priority under it, and updates of priorities wait.
  void raise_priorities(double power);
  // What rows and steps enter with that are given no priority, fixed point: 1, or with max_priority the largest
  // priority that was given until now, and 1 until one is.
  uint32_t new_priority() const {
    const uint32_t largest = largest_ == nullptr ? 0 : largest_->load(kRelaxed);
    return largest == 0 ? rounded(1.0) : largest;
  }
  bool keeps_max_priority() const { return largest_ != nullptr; }
  // The largest that was given, 0 where none was, or the store keeps none; and the same of a store that is restored.
  uint32_t max_priority() const { return largest_ == nullptr ? 0 : largest_->load(kRelaxed); }
  void restore_max_priority(uint32_t largest);
  // Lowers it to the largest priority that a row or step has now. A pass over the words under the lock; updates of
  // priorities wait meanwhile. Throws schema where the store keeps none.
  void reset_max_priority();
  // Sets how often rows were sampled, by key, from a checkpoint; keys whose row no longer exists are skipped.
  void set_times_sampled(std::span<const uint32_t> rows, std::span<const uint32_t> generations,
                         std::span<const uint32_t> counts);

  // The next commit gets this sequence number, or the one after the last commit's where that is larger: shards of one
  // population keep their commits in one order this way.
  void advance_sequence(uint64_t next);

  // Rows with spans and tasks (store/tasks.h); nullptr in a store without.
  Tasks* tasks() const { return tasks_.get(); }
  // Throws schema for a number of no field, and for a field whose values lie in spans.
  void check_column(uint32_t field) const;

  // Where the ends of episodes are marked; none where a row is one.
  EpisodeMarks episode_marks() const;
  // Where it is kept which of their steps rows repeat; none where no row does.
  RowRepeats row_repeats() const;

  // A row's content number, to be compared before and after a copy of it (segment.h); 0 where there is none.
  uint64_t content_number(uint32_t row) const {
    return status_.data()[row].inserted_at_ns.load(std::memory_order_relaxed) & content_mask_;
  }
  // Waits until it is even, for as long as for the lock; a writer that died is repaired after. False where it stays
  // odd: its writer is stopped, or died and the segment is read-only, or the handle is being closed; and at once where
  // nobody holds the lock, without which nobody writes: the segment is damaged.
  bool await_content(uint32_t row) const noexcept;

  // Deletes rows by key. Returns how many no longer existed; `removed`, where it is given, tells which did.
  uint64_t remove(std::span<const uint32_t> rows, std::span<const uint32_t> generations,
                  std::span<uint8_t> removed = {});

  // By which batch rows are taken, and their places in it (Tasks::take).
  struct Taking {
    uint64_t step = 0;
    std::span<const uint32_t> places;
  };
  // Counts one sample against each key; a handle that changes nothing only looks whether it is stale. taken[i] is 0
  // when the key is stale or its samples are used up (draw again). With max_times_sampled, a row whose last sample this
  // is stays readable for this process, and for no other, until release_exhausted; or with `taking`, which is for
  // stores with tasks whose rows have one sample, for all until they are freed. Throws schema for other stores, and for
  // steps and places that words have no room for.
  // Returns how many rows' last samples these were, in a store with tasks: they are in flight until Tasks::finished.
  uint64_t count_samples(std::span<const uint32_t> rows, std::span<const uint32_t> generations,
                         std::span<uint8_t> taken, const Taking* taking = nullptr);
  void release_exhausted(std::span<const uint32_t> rows, std::span<const uint32_t> generations);

  // Expires rows older than max_age; returns how many. Cheap when there are none.
  uint64_t expire();

  // --- the journal on disk: journal.cc ----------------------------------------------------------------------------

  bool has_journal() const { return journal_control().mode.load(std::memory_order_acquire) != 0; }
  JournalControl& journal_control() const { return *reinterpret_cast<JournalControl*>(base() + kJournalOffset); }
  // From here on commits are bounded by what the journal in that directory holds. Throws schema (the path is too long,
  // or there is a journal already).
  void set_journal(const std::string& path, bool full_is_error, uint64_t sync_ns);
  // For whoever writes the journal: what is not in it yet, given a generation (0: none) and a time of each row of the
  // capacity that are. Rows committed or sealed from `sequence` on come first, in their order; then such as were
  // written in place, with `rewritten`. Takes the lock for a look at each new row; looks at all words without it.
  JournalChanges journal_changes(uint64_t sequence, std::span<const uint32_t> generations,
                                 std::span<const uint64_t> times, bool rewritten);
  // Sleeps until a pass is asked for, whose ticket is not `seen`; the newest ticket. Returns early when it is closed.
  uint32_t await_journal_request(uint32_t seen, double timeout_s) const;
  // A pass that began at `synced_ns` is on the disk with all that was asked for up to `ticket`; or failed with `error`.
  void journal_passed(uint32_t ticket, uint64_t synced_ns);
  void journal_failed(uint32_t error);
  // Has its next pass, which is asked for, write the priorities and counts of samples that have changed. Does not wait.
  void request_journal_priorities();
  // Has all that was committed or removed until now written; false where it is not on the disk in time, with the
  // disk's error, or 0.
  bool sync_journal(double timeout_s, uint32_t* error = nullptr);
  // After rows were put, inserted, removed or written: with a bound of 0, or where it is to be durable, that is on the
  // disk. Nothing in a store without a journal. Throws lock_timeout and no_space, with what has been done to rows.
  void settle_journal(const char* what, bool durable = false);

  // --- the rate limiter (rate_limiter.h), of a store that is open and may be written ------------------------------

  void set_limiter(const RateLimiterSettings& settings, bool afresh);
  // Whether the limiter counts steps, not rows.
  bool limited_by_steps() const { return control().limiter.unit.load(kRelaxed) == RateLimiter::kSteps; }
  // A wait that another thread's close() ends throws closed.
  bool admit_inserts(uint64_t n, double timeout_s);
  bool admit_samples(uint64_t n, double timeout_s);
  void give_back(uint64_t inserts, uint64_t samples);

  // --- inspection ---------------------------------------------------------------------------------------------

  StoreCounts counts() const;
  // Processes attached and alive. Works read-only.
  uint32_t live_clients() const;

  // Whether the last process that had it open has closed it, and none has opened it since. False where all were killed.
  bool closed_in_order() const { return control().clean != 0; }
  uint64_t committed_count() const { return control().committed_count.load(std::memory_order_acquire); }
  // The next commit's; changed by the lock's holder, read by any thread.
  uint64_t next_sequence() const { return std::atomic_ref(control().next_sequence).load(kRelaxed); }
  // Keys of all committed rows, oldest first; and of all free rows, next to be allocated first.
  void keys(std::vector<uint32_t>* rows, std::vector<uint32_t>* generations);
  // Steps of all committed rows that can be drawn: those which are not marked `last`, and of steps that two rows have
  // one. A pass over the rows, without the lock.
  uint64_t step_count() const;
  // The same, or a smaller number that is not below `enough`, which mostly costs no pass: rows that are removed take
  // max_length steps with them at most.
  uint64_t step_count_up_to(uint64_t enough) const;
  // Of the steps [0, length) of a row: those that count.
  uint32_t counted_steps(uint32_t row, uint32_t length) const;
  std::vector<uint32_t> free_rows();
  RowInfo info(uint32_t row) const;

  // Identity and layout, as they were checked when the segment was opened: a copy that no other process can change.
  const Header& header() const { return geometry_.header; }
  Control& control() const { return *reinterpret_cast<Control*>(base() + kControlOffset); }
  PendingCommit& pending_commit() const { return *reinterpret_cast<PendingCommit*>(base() + kPendingOffset); }
  const FieldRecord* fields() const { return geometry_.fields.data(); }
  std::byte* block(uint32_t field, uint64_t row) const {
    return base() + fields()[field].offset + row * fields()[field].stride;
  }
  std::atomic<uint64_t>* words() const { return words_; }
  const StatusTable& status() const { return status_; }
  uint32_t* heap_rows() const { return region<uint32_t>(kHeapRegion); }
  const PriorityTree& priority_tree() const { return priority_tree_; }
  const BitTree& bit_tree() const { return bit_tree_; }
  // Of stores with priorities of steps: the tree over leaves row * max_length + step.
  bool per_step() const { return (header().required_features & kStepPriorities) != 0; }
  const PriorityTree& step_tree() const { return step_tree_; }
  uint64_t leaf_of(uint64_t row, uint64_t step) const { return row * header().max_length + step; }
  // The fixed-point priority of a step, 0 for a stale key; the sum of a row's; and those of a row's first steps, false
  // where it does not have them (any more). Without the lock.
  uint32_t step_priority(uint32_t row, uint32_t generation, uint32_t step) const;
  uint64_t sum_of_steps(uint32_t row) const;
  bool copy_step_priorities(uint32_t row, uint32_t generation, std::span<uint32_t> out) const;
  Client& client(uint32_t slot) const {
    if (slot >= kMaxClients) [[unlikely]]
      fail_damaged("a row is owned by client", slot);
    return clients()[slot];
  }
  const std::shared_ptr<Mapping>& mapping() const { return mapping_; }
  // It changes nothing: it was opened so, or has become so by seal_segment.
  bool read_only() const { return read_only_.load(kRelaxed); }
  double lock_timeout_s() const { return lock_timeout_s_; }
  // Throws closed, read_only.
  void check_usable() const;
  // Throws corrupt, and has the next holder of the lock rebuild the lists.
  [[noreturn]] __attribute__((cold, noinline)) void fail_damaged(const char* what, uint64_t number) const;

  // --- repair: repair.cc --------------------------------------------------------------------------------

  // Reclaims what dead processes held. Returns the number of processes found dead.
  uint32_t reap();
  // For whoever draws: sums that a process left half changed when it died are set right first. A load for each client,
  // and a system call for each in the middle of an update.
  void repair_dead_updates();
  // Rebuilds all derived state from the authoritative state. Not needed by users of this class alone.
  void rebuild();
  // Inconsistencies, one sentence each; empty for a consistent store. Takes the lock.
  std::vector<std::string> audit();
  // Restores rows from a checkpoint: committed ones (odd generation) in the order of their sequence, free
  // ones in the order of the queue. The store must be new, with all its rows allocated by this process and filled.
  // With priorities of steps `steps` are those of the committed rows' steps, one row after the other.
  void restore(std::span<const RestoredRow> rows, uint64_t next_sequence, std::span<const uint32_t> steps = {});

  // Holds the segment's lock for its lifetime. Throws lock_timeout, and closed when another thread closes the handle.
  class Guard {
   public:
    explicit Guard(const Store& store) : Guard(store, store.lock_timeout_s_) {}
    Guard(const Store& store, double timeout_s);
    ~Guard();
    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;

   private:
    const Store& store_;
  };

  // --- what concerns all stores of a process: open_stores.cc ------------------------------------------------------

  void before_fork() override { given_up_mutex_.lock(); }
  void after_fork(bool in_child) override;
  void close_at_exit() noexcept override;

 private:
  Store(Mapping mapping, Geometry geometry);
  void bind_trees();
  std::string damaged_tasks() const;

  std::byte* base() const { return mapping_->data(); }
  Client* clients() const { return reinterpret_cast<Client*>(base() + kClientsOffset); }
  template <typename T>
  T* region(RegionId id) const {
    return reinterpret_cast<T*>(base() + header().regions[id].offset);
  }

  [[noreturn]] void refuse_closed() const;
  [[noreturn]] void refuse_writing() const;
  void mark_clean();
  void refuse_spans(const char* what) const;
  void bind_tasks();  // tasks.cc
  void clear_tasks();
  void wake_tasks() const;
  void check_rows(std::span<const uint32_t> rows) const;
  void join();  // takes a client slot; the gate is held
  void shut(bool keep, double timeout_s, Deadline calls_end);
  void leave(bool keep, double timeout_s);
  void flush() const;
  int wait_for_lock(double timeout_s) const;
  void ensure_client();  // joins again in a forked child

  // Under the lock. Rows' changes reach the trees through Sums, a node at a time; it is made after the Guard, so that
  // the sums are consistent again before the lock is released.
  struct Sums {
    explicit Sums(const Store& store);
    ~Sums();
    Sums(const Sums&) = delete;
    Sums& operator=(const Sums&) = delete;
    // Before step words of a row are changed, or a word that decides whether they count: notes it in the journal.
    void begin(uint32_t row);
    // Whoever sees more rows counted than before must find them: called before committed_count rises.
    void settle();

    PriorityTree::Adder priorities;
    BitTree::Adder bits;
    PriorityTree::Adder steps;
    StepJournal* journal;  // nullptr: the store has no priorities of steps
  };
  // Under the lock: no process changes priorities without it, from wait_for_priority_writers() on. Nothing is left half
  // done, so that a call that ends early owes nobody a rebuild; a mark that somebody else leaves (fail_damaged) stays.
  class WritersOut {
   public:
    explicit WritersOut(const Store& store) : rebuilding_(store.control().rebuilding) { rebuilding_.store(kForACall); }
    ~WritersOut() {
      uint32_t mine = kForACall;
      rebuilding_.compare_exchange_strong(mine, 0);
    }
    WritersOut(const WritersOut&) = delete;
    WritersOut& operator=(const WritersOut&) = delete;

   private:
    static constexpr uint32_t kForACall = 2;
    std::atomic<uint32_t>& rebuilding_;
  };
  StepJournal* journals() const { return region<StepJournal>(kStepJournalsRegion); }
  void check_per_step() const;
  void add_steps(Sums& sums, uint32_t row, uint32_t generation, uint32_t from, uint32_t to, uint32_t priority);
  void clear_steps(Sums& sums, uint32_t row, uint32_t generation);  // after begin(row)
  void clear_last_steps(Sums& sums, std::span<const uint32_t> rows);
  // Of a row that has become complete: the steps that are drawn from the row after lose their priorities.
  void clear_followed_steps(Sums& sums, uint32_t row);
  // The steps of a row of which it, and not a neighbour, has the priorities.
  StepRange own_steps(uint32_t row, uint32_t length) const;
  void raise_row_priorities(double power);
  void raise_step_priorities(double power);
  // What dead processes had noted in their journals.
  struct StepsInDoubt {
    std::vector<uint32_t> leaves, rows, clients;
    bool everything = false;
    void add(const StepJournal& journal, bool of_rows);
  };
  void repair_steps_of(uint32_t row);
  void repair_steps_locked(const StepsInDoubt& doubt);  // writers of priorities are out
  uint64_t audit_steps(const std::function<void(const std::string&)>& wrong) const;
  void release_abandoned_locked();  // rows whose abandon timed out
  void take_free_rows(std::span<uint32_t> rows);
  void put_free_row(uint32_t row);
  void hold(uint32_t row, uint32_t slot, RowState state);
  uint64_t& held_count(RowState state) const;
  void hold(std::span<const uint32_t> rows, uint32_t slot);  // to be written
  void unhold(uint32_t row);
  void unhold(std::span<const uint32_t> rows);  // of one client, in one state
  void link_order(std::span<const uint32_t> rows);
  void link_order_before(uint32_t row, uint32_t next);
  void unlink_order(uint32_t row);
  void set_bit(Sums& sums, uint32_t row, bool selectable);
  uint32_t victim() const;
  bool evict_one(Sums& sums);
  // Evicts one row or more for a caller who holds them next; returns how many. There have to be as many.
  size_t take_victims(Sums& sums, std::span<uint32_t> rows);
  // For removers that order rows by what changes without the lock: ranks all of them, and evicts `needed` or a 64th.
  void evict_worst(Sums& sums, size_t needed);
  size_t evict_some_of_the_worst(Sums& sums, size_t needed);
  void reserve_for_ranking();
  void note_sampled(uint32_t row, uint64_t samples) const;
  void set_next_sequence(uint64_t next) { std::atomic_ref(control().next_sequence).store(next, kRelaxed); }
  uint64_t samples_so_far() const { return control().counters.sampled.load(kRelaxed); }
  void retire(Sums& sums, uint32_t row);  // a committed row: no longer selectable, on no list
  void make_unselectable(Sums& sums, uint32_t row);
  void free_spent(uint32_t row);  // an exhausted row: its last key is stale from here on
  uint64_t expire_locked(Sums& sums, uint64_t now_ns);
  void check_taking(const Taking& taking, size_t rows) const;
  void check_held(std::span<const uint32_t> rows, RowState state = RowState::writing) const;
  uint64_t commit_time() const;
  void check_extended(std::span<const uint32_t> rows, std::span<const uint32_t> lengths) const;
  void enter(Sums& sums, const RowChanges::Entering& publish, const RowChanges::Entering& commit);
  void write_values(uint32_t row, size_t i, const CommitValues& values, uint32_t fresh, uint64_t sequence,
                    uint64_t now_ns);
  uint32_t make_selectable(Sums& sums, uint32_t row, uint32_t priority);
  bool finish_pending(uint32_t row, RowStatus& status);
  void seal_locked(uint32_t row, uint64_t now_ns);
  int32_t find_episodes_field() const;
  void find_repeats_field();
  void find_last_field();
  void set_episodes(uint32_t row, uint32_t episodes);
  void count_episodes(uint32_t row);  // a row whose writer is gone, by its marks; nothing where a row is one episode
  void end_repeats(uint32_t row);     // likewise: no row comes after it
  void check_the_cap(size_t rows) const;
  void apply_now(const RowChanges& changes);
  void take_back(const RowChanges& changes, std::span<const uint32_t> sealed);
  void admit_to_journal() const;
  bool is_settled(uint32_t* error);
  [[noreturn]] void refuse_journal(uint32_t error, const std::string& before, const char* after) const;
  void make_room_at_the_cap(Sums& sums);
  uint64_t removable_count() const { return committed_count() - control().open_count; }
  void set_priority_locked(uint32_t row, uint32_t priority);
  uint32_t reap_locked();
  void reap_now_and_then();
  void reclaim(uint32_t slot);
  // With priorities of steps: of all steps, or of those alone that the journals of the dead and of the lock name.
  enum class Steps : uint8_t { all, noted };
  void rebuild_locked(Steps steps);
  void rebuild_trees_locked(const StepsInDoubt& doubt);
  void wait_for_priority_writers() const;
  uint32_t fixed_point(double priority);
  // What is given to a row or step, fixed point, before its word is changed: the largest priority is never below it.
  uint32_t given(double priority) {
    const uint32_t fixed = fixed_point(priority);
    if (largest_ != nullptr) raise_largest(fixed);
    return fixed;
  }
  // Out of line: stores without it update their priorities in a loop that has room for no more.
  __attribute__((noinline)) void raise_largest(uint32_t priority) {
    uint32_t known = largest_->load(kRelaxed);
    while (known < priority && !largest_->compare_exchange_weak(known, priority, kRelaxed)) {
    }
    std::atomic_signal_fence(std::memory_order_seq_cst);
  }
  uint32_t raised(uint32_t priority, double power);
  uint32_t rounded(double priority) const;  // the same, not counted
  __attribute__((cold, noinline)) void count_clamped(double priority);
  void validate_priorities(std::span<const double> priorities) const;

  friend class PriorityWriter;
  friend class Tasks;

  // A row in the order in which a remover takes rows.
  struct RankedRow {
    double score;
    uint64_t sequence;
    uint32_t row;
    bool operator<(const RankedRow& other) const {
      return score != other.score ? score < other.score : sequence < other.sequence;
    }
  };

  std::shared_ptr<Mapping> mapping_;
  Geometry geometry_;
  std::atomic<uint64_t>* words_ = nullptr;
  std::atomic<uint32_t>* largest_ = nullptr;  // priority that was given; nullptr: it is not kept
  StatusTable status_;
  PriorityTree priority_tree_;
  BitTree bit_tree_;
  PriorityTree step_tree_;
  std::shared_ptr<Tasks> tasks_;  // whose deleter knows it
  mutable Lifetime calls_{"store"};
  std::atomic<uint32_t> client_slot_{kNoClient};  // none: read-only, or a forked child that has not joined
  std::mutex joining_mutex_;
  std::mutex journal_mutex_;
  std::mutex given_up_mutex_;
  std::vector<uint32_t> given_up_;
  std::vector<RankedRow> worst_;  // under the segment's lock; room for a share of the rows, of no other stores
  double lock_timeout_s_ = 10.0;
  uint64_t content_mask_ = 0;    // all ones in segments with content numbers
  int32_t episodes_field_ = -1;  // that counts the episodes of a row; -1: a row is one
  int32_t repeats_field_ = -1;   // that counts the steps which a row shares with its neighbours; -1: with none
  uint32_t repeats_n_step_ = 1;  // `after` of the views that its steps have priorities for (selection/row_repeats.h)
  const FieldRecord* last_field_ = nullptr;  // that marks steps which have an observation alone; nullptr: there is none
  // What step_count() was, with max_length for each row that had been removed by then; 0: never.
  mutable std::atomic<uint64_t> steps_and_removed_{0};
  std::atomic<bool> read_only_{false};
  bool lost_in_fork_ = false;
  std::atomic<bool> keep_{false};
  double priority_scale_ = 1.0;  // 2^priority_fraction_bits
};

}  // namespace geartrain
