// Segment format: the layout of its bytes, and their meaning. This file is the format's manual.
//
//   offset 0       Header         identity and layout; written once, before the segment has a name
//          4096    Control        the lock, the lists' ends, the counters; changes all the time
//          6144    PendingCommit  rows that the lock's holder is making selectable together
//          6400    NewPriority    the largest priority that was given; zero without one, or without kMaxPriority
//          6656    JournalControl where the rows' journal on disk is, and how far it is; zero without one
//          8192    FieldRecord    [64]  the schema
//          16384   Client         [256] the attached processes
//   regions[...]   (64-byte aligned, offsets in the header)
//     status       RowStatus [capacity]           state and metadata of a row, except its priority
//     words        u64 [capacity, padded to 16]   generation << 32 | priority, the authoritative state of a row
//     priority_nodes u64 [...]                      inner nodes of the sum tree over the words' priorities
//     bits         u64 [capacity / 64, padded]    one bit a row: selectable
//     bit_nodes    u64 [...]                      inner nodes of the tree that counts the bits
//     heap         u32 [capacity]                 lowest priority first; only with that remover
//     step_words   u64 [capacity * max_length, padded]  generation << 32 | priority of a step; only with
//                                                 priorities of steps, as the two below
//     step_nodes   u64 [...]                      inner nodes of the sum tree over the step words' priorities
//     journals     StepJournal [257]              whose sums are in doubt should a process die: one a client, and one
//                                                 of the lock's holder
//     tasks        TaskTable                      axes, tasks and their counters; this and the next two only with
//                                                 kRowSpans
//     task_words   u64 [capacity * (tasks + 1)]   state of each task of a row; the first is the insert's. Behind them,
//                                                 i64 of as many: its version, or kNoVersion; and u64 of as many: the
//                                                 number of its last change
//     due          u64 [(tasks + 1) * ceil(capacity / 64)]  one bit a row and task: may be claimed; first: it is free
//     columns                                     one array per field, a block per row, blocks 64-byte aligned
//     spans        units of 64 bytes              values of fields that have their own length in each row
//
// A row's life, and its generation g (32 bits, wraps):
//
//   free (g even) --allocate--> writing (g even) --commit--> committed (g+1, odd) --evict, delete--> free (g+2)
//                                   | abandon, or its writer died        | its last allowed sample was drawn
//                                   v                                    v
//                                 free (g even)                        exhausted (g+1, odd, priority 0) --> free (g+2)
//
//   writing --publish--> open (g+1, odd) --seal, or its writer died--> committed (g+1, odd)
//
// An open row is selectable like a committed one, while its writer appends steps behind the published ones: a
// length only grows, and is stored after the steps it counts. It cannot be evicted or deleted; it takes its place in
// the order of commits when it is sealed.
//
// One 64-bit word carries both generation and priority, so "change the priority if the key still holds" is one
// compare-and-swap and a stale key cannot touch a new row. A key is (row, odd generation).
//
// Priorities of steps (required_features, kStepPriorities). Leaf row * max_length + step of a second sum tree is the
// word of a step: its row's generation while the row is committed and has that step, and an even one with priority 0
// otherwise. So a key (row, generation, step) is checked by one compare-and-swap, as a row's is. The rows' own words
// have priority 0 in such a segment. The step words are authoritative, the nodes above them derived.
//
// Priority of new rows and steps (required_features, kMaxPriority). A row or step that is stored without a priority
// gets NewPriority::largest, the largest fixed-point priority that any process has given to one, by an insert or an
// update; 1 while that is 0. Without the feature it gets 1. Whoever gives a larger one raises the number by
// compare-and-swap before it changes the word, so after its death the number is too large at worst. It is lowered only
// on request, by the lock's holder while no process changes priorities.
//
// Authoritative and derived state. Authoritative: the words; in the status table state, owner, sequence and the user's
// numbers. Derived, and rebuilt from those whenever a process died inside the lock: the free queue, the order
// list, the clients' held lists, the heap, both trees, the bits, the counts. A commit takes effect with the one
// store of its odd word; whatever a killed process had done before that is undone. A commit of several rows takes
// effect with the one store of PendingCommit::first, and is completed by whoever rebuilds: all of them or none.
//
// Content. The bytes of a committed row stay what they are while its generation does, unless they are written in place
// (Store::rewrite): the row's `content` number is odd meanwhile, and another even one afterwards. It is the time of the
// commit, whose lowest bit is given up for it: one write in place moves it by two nanoseconds, and the row counts as
// changed for whoever compares. Readers take it before and after a copy. Written under the lock; a row whose number is
// found odd by a rebuild was lost with its writer, and is freed. Only in segments with kContentNumbers.
//
// Journals. Before a client changes step words without the lock it notes their leaves, and the lock's holder the rows
// whose step words it is about to change; both are struck out when the sums above them are right again. So after a
// death only what the dead had noted is set right, however many steps there are.
//
// Writers. Everything but the words' priorities and the priority nodes: the holder of Control::mutex (robust:
// the kernel passes it on when its holder dies). Priorities: any attached process, by compare-and-swap, registered in
// its Client::priority_writers meanwhile, so that a rebuild can wait until no update is in progress. Readers take no
// lock: they read the word, copy the block, and read the word again (fetch.cc).
//
// Rows of their own lengths, and tasks (required_features, kRowSpans). A field with an axis, and a field that a task
// writes, has no column: its values lie in spans. A span holds what one insert, put or append wrote of a row: a head of
// 64 bytes (span_heap.h), then field after field, each 64-byte aligned (SpanLayout in store/span_layout.h). The word of
// a (row, task) leads to the first span of a chain. A row's life has one more state between writing and committed:
//
//   writing (g even) --insert--> under way (g even) --the last task is due--> committed (g+1, odd) --> as above
//                                     | dropped
//                                     v
//                                   free (g+2)
//
// A batch that keeps its rows takes them: they are drawn, and stay until the steps of their batches are told to be
// saved. They are on no list, have no bit and no priority, belong to no process, and keep their key.
//
//   committed (g+1, odd) --taken by a batch--> taken (g+1, odd, priority 0) --freed--> free (g+2)
//           ^                                         |
//           +-- untaken: its batch is not complete ---+
//
// A row is taken from the one store of its last task's word on, which says by which batch, until its generation changes
// or that word is cleared; its priority waits in heap_slot.
//
// A row under way is on the order list at the place of its insert, has no bit and no priority, and keeps that of its
// insert in heap_slot. A key names it by the generation that it gets when it is committed, so that keys last until the
// row is free. Nothing is evicted in such a segment. Authoritative: the task words, their versions and the heads that
// they lead to. Derived: due bits, counters of TaskTable, the heap's lists, RowStatus::version.
//
// The version of a (row, task) is that of the policy which did it, or began it. It is stored after the word that says
// claimed, and is void where a task is neither claimed nor done and keeps no span. A row's version is the least of its
// tasks', or else its insert's.
//
// Change numbers. TaskTable::change counts what a journal or checkpoint has to keep of a store's rows: inserts, puts,
// tasks that are set back, rows that are taken, given back or freed. The (row, task) has the number of its last change,
// stored under the lock before its word; claims, releases and appends are none. So a death in between tells of a change
// that there was not, at worst.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/shared_file.h"
#include "segment/rate_limiter.h"
#include "segment/span_heap.h"

namespace geartrain {

constexpr char kMagic[8] = {'G', 'E', 'A', 'R', 'T', 'R', 'N', '\n'};
constexpr uint32_t kFormatVersion = 2;
constexpr uint32_t kMaxFields = 64;
constexpr uint32_t kMaxDims = 8;
constexpr uint32_t kMaxNameBytes = 63;
constexpr uint32_t kMaxClients = 256;
constexpr uint64_t kMaxRows = 0xfffffff0u;  // rows are 32-bit numbers
constexpr uint32_t kNoRow = 0xffffffffu;
constexpr uint32_t kNoClient = 0xffffffffu;
constexpr uint64_t kBlockAlignment = 64;
constexpr uint64_t kStepPriorities = 1;  // required_features: every step has a priority of its own
constexpr uint64_t kContentNumbers = 2;  // required_features: a reader has to look at the rows' content numbers
constexpr uint64_t kMaxPriority = 4;     // required_features: a writer has to keep the largest priority
constexpr uint64_t kRowSpans = 8;        // required_features: rows have spans and tasks
constexpr uint64_t kKnownFeatures =
    kStepPriorities | kContentNumbers | kMaxPriority | kRowSpans;  // bits this build understands
constexpr uint32_t kMaxAxes = 8;
constexpr uint32_t kMaxTasks = 64;

// The remover is the low byte of Header::remover; above it, for those that go by a field, the field's number.
enum class Remover : uint32_t {
  fifo = 0,
  lifo = 1,
  lowest_priority = 2,
  least_recently_sampled = 3,
  most_sampled = 4,
  lowest_value = 5,   // of a field that a row has once
  highest_value = 6,  // likewise
};
constexpr uint32_t kRemovers = 7;
constexpr Remover remover_of(uint32_t stored) {
  return static_cast<Remover>(stored & 0xff);
}
constexpr uint32_t remover_field_of(uint32_t stored) {
  return stored >> 8;
}
enum class RowState : uint8_t {
  free = 0,
  writing = 1,
  committed = 2,
  exhausted = 3,
  open = 4,
  under_way = 5,
  taken = 6
};

enum RegionId : uint32_t {
  kStatusRegion,
  kWordsRegion,
  kPriorityNodesRegion,
  kBitsRegion,
  kBitNodesRegion,
  kHeapRegion,
  kColumnsRegion,
  kStepWordsRegion,
  kStepNodesRegion,
  kStepJournalsRegion,
  kTasksRegion,
  kTaskWordsRegion,
  kDueRegion,
  kSpansRegion,
  kRegionCount = 16,  // the rest is zero, for later formats
};

struct Region {
  uint64_t offset;
  uint64_t bytes;
};

struct Header {
  char magic[8];
  uint32_t format_version;
  uint32_t header_bytes;
  uint64_t fingerprint;        // over everything below and the sizes this build gives to every struct here
  uint64_t required_features;  // a bit this build does not know means: refuse to attach
  uint64_t segment_bytes;
  uint64_t capacity;    // rows
  uint64_t max_rows;    // committed rows kept at most, <= capacity
  uint64_t max_age_ns;  // 0: no limit
  uint32_t max_length;  // steps
  uint32_t field_count;
  uint32_t max_clients;
  uint32_t fanout;
  uint32_t remover;
  uint32_t max_times_sampled;       // 0: no limit
  uint32_t priority_fraction_bits;  // a stored priority is round(priority * 2^bits)
  uint32_t persist;                 // the name stays when the last process leaves
  uint64_t created_ns;              // wall clock
  uint64_t store_id;                // random, to distinguish this store from an earlier one of the same name
  Region regions[kRegionCount];
};
static_assert(sizeof(Header) == 112 + 16 * kRegionCount);
static_assert(offsetof(Header, regions) == 112);

// What an item of a field in spans is.
enum class SpanKind : uint8_t { array = 0, bytes = 1, text = 2 };  // bytes, text: a string of bytes, of any length

struct FieldRecord {
  char name[kMaxNameBytes + 1];
  uint8_t dtype;  // schema.py's DTYPES
  uint8_t ndim;
  uint8_t timed;
  uint8_t itemsize;
  uint32_t shape[kMaxDims];  // of a field in spans: of one item
  // With kRowSpans, else 0.
  uint8_t axis;     // its first axis, counted from 1; 0: none
  uint8_t task;     // that writes it; 0: the insert
  uint8_t divides;  // the axis that its values cut into parts, counted from 1; 0: none
  SpanKind kind;
  uint64_t block_bytes;  // of one row, without padding; of a field in spans: of one item
  uint64_t stride;       // from one row's block to the next, a multiple of 64
  uint64_t offset;       // of the column, from the segment's start
};
static_assert(sizeof(FieldRecord) == 128);

// Whether its values lie in spans, of a segment with kRowSpans.
inline bool in_spans(const FieldRecord& field) {
  return field.axis != 0 || field.task != 0 || field.kind != SpanKind::array;
}

// Of a field without time: of its row.
inline uint64_t bytes_per_step(const FieldRecord& field) {
  return field.timed != 0 ? field.block_bytes / field.shape[0] : field.block_bytes;
}

// An attached process. `in_use`, `pid` and `held` change under the lock.
struct alignas(64) Client {
  uint32_t in_use;
  int32_t pid;  // for messages; liveness is the lease's (file_lock.h)
  uint64_t joined_ns;
  uint32_t held;  // first of the rows it is writing, extending or reading for the last time, linked by next
  uint32_t held_count;
  std::atomic<uint32_t> priority_writers;  // threads in the middle of an update of priorities
  uint32_t claims_for_others;              // not 0: its death says nothing against a row: it claims rows for peers,
                                           // or died with all other clients
};
static_assert(sizeof(Client) == 64);

// What one client is changing among step words, or the lock's holder. `count` entries are in doubt while it is above 0;
// kEverything: all of the tree.
constexpr uint32_t kJournalEntries = 256;
constexpr uint32_t kEverything = 0xffffffffu;
struct alignas(64) StepJournal {
  std::atomic<uint32_t> count;
  uint32_t reserved[15];
  std::atomic<uint32_t> entries[kJournalEntries];  // leaves; of the lock's holder: rows
};
static_assert(sizeof(StepJournal) == 64 + 4 * kJournalEntries);
constexpr uint32_t kJournals = kMaxClients + 1;  // the last is the lock holder's

// Events since the store was made. Relaxed atomics: exact when no process is active.
struct Counters {
  std::atomic<uint64_t> inserted;    // rows committed
  std::atomic<uint64_t> evicted;     // by the remover, to make room
  std::atomic<uint64_t> expired;     // by age
  std::atomic<uint64_t> exhausted;   // by their last allowed sample
  std::atomic<uint64_t> deleted;     // on request
  std::atomic<uint64_t> abandoned;   // freed unwritten
  std::atomic<uint64_t> reclaimed;   // reclaimed from processes that died
  std::atomic<uint64_t> sampled;     // samples counted against rows
  std::atomic<uint64_t> torn;        // copies discarded because the row changed meanwhile
  std::atomic<uint64_t> stale_keys;  // updates and deletions of rows that no longer exist
  std::atomic<uint64_t> priorities_updated;
  std::atomic<uint64_t> priorities_saturated;   // too large for 32 bits, stored as the largest
  std::atomic<uint64_t> priorities_rounded_up;  // positive but below the resolution, stored as the smallest
  std::atomic<uint64_t> repairs;                // rebuilds after a death inside the lock
};
constexpr int kCounterCount = sizeof(Counters) / sizeof(uint64_t);

struct Control {
  pthread_mutex_t mutex;  // robust, process-shared
  char mutex_padding[60 - sizeof(pthread_mutex_t)];
  std::atomic<uint32_t> client_slots;  // all clients' slots are below; 0: not known, as an earlier build left it
  std::atomic<uint32_t> rebuilding;    // priority writers stay out; 1: until the lists are rebuilt, 2: for a call
  uint32_t closed;                     // the name is removed; no process may join
  uint32_t clean;                      // the last process left in an orderly way
  uint32_t free_head, free_tail;       // the free-index queue, linked by RowStatus::next
  uint32_t order_head, order_tail;     // committed rows, oldest first, linked both ways
  uint32_t heap_count;
  uint64_t free_count, writing_count, exhausted_count, open_count;
  std::atomic<uint64_t> committed_count;  // selectable rows: open ones as well
  uint64_t next_sequence;
  uint64_t last_reap_ns;
  Counters counters;
  RateLimiter limiter;
};
static_assert(sizeof(pthread_mutex_t) < 60 && offsetof(Control, rebuilding) == 64);
static_assert(sizeof(Control) <= 2048);

// Before that: written by the lock's holder, read by a rebuild. Bytes that earlier builds left zero.
struct PendingCommit {
  std::atomic<uint64_t> first;  // sequence of the first of the rows; 0: there are none
  uint32_t rows;                // their sequences follow each other
  uint32_t open_rows;           // the first so many are published, the others committed
};
static_assert(sizeof(PendingCommit) == 16);

// Bytes that earlier builds left zero.
struct NewPriority {
  std::atomic<uint32_t> largest;  // fixed point; 0: no priority was given
};

// The journal on disk of a store that has one (store/journal.cc); all zero otherwise, and in segments of earlier
// builds. Written by whichever process writes the journal, but for `requested`, `rewrites` and `priorities`.
constexpr uint32_t kJournalPathBytes = 1024;
struct JournalControl {
  std::atomic<uint32_t> mode;       // JournalMode; stored last, once the rest is there
  std::atomic<uint32_t> error;      // errno of the last pass, 0 when it reached the disk
  std::atomic<uint32_t> requested;  // tickets: passes that were asked for. Its writer sleeps on it
  std::atomic<uint32_t> completed;  // the last ticket that a pass on the disk has served. Commits sleep on it
  std::atomic<uint64_t> sync_ns;    // the bound; 0: before a commit returns
  std::atomic<uint64_t> synced_ns;  // monotonic clock: what was committed before is on the disk; 0: nothing yet
  std::atomic<uint64_t> rewrites;   // rows written in place
  std::atomic<uint64_t> rows, removals, bytes, missed, waits;
  char path[kJournalPathBytes];  // of the directory, ended by a zero
  // How often the priorities of all rows were asked for, as whoever saves a checkpoint does. 0 in earlier builds.
  std::atomic<uint32_t> priorities;
};

struct RowStatus {
  std::atomic<uint64_t> sequence;  // 1, 2, 3, ... in the order of commits
  std::atomic<int64_t> version;
  std::atomic<uint64_t> inserted_at_ns;  // wall clock; its lowest bits are the content number
  std::atomic<uint32_t> length;
  std::atomic<uint32_t> times_sampled;
  uint32_t previous, next;  // in the one list the row is on: free queue, order list or a client's held list
  // Before the row is in the heap: the priority that it gets (PendingCommit); with least_recently_sampled, afterwards:
  // when it was sampled last.
  uint32_t heap_slot;
  uint16_t owner;  // client slot, while writing, open or exhausted
  RowState state;
  uint8_t mark;  // scratch of the lock's holder
};
static_assert(sizeof(RowStatus) == 48);
static_assert(offsetof(RowStatus, length) == 24);
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

// An axis: the task that its first field belongs to sets its length in a row.
struct AxisRecord {
  char name[kMaxNameBytes + 1];
  uint32_t owner;    // number of the task, 0: the insert
  uint32_t divided;  // number of the field that divides it, counted from 1; 0: none
};
static_assert(sizeof(AxisRecord) == 72);

struct TaskRecord {
  char name[kMaxNameBytes + 1];
  uint64_t after;  // tasks whose results it needs, bit (number - 1) of each; those of its own `after` included
  uint32_t flags;  // TaskFlags
  uint32_t reserved;
};
static_assert(sizeof(TaskRecord) == 80);
enum TaskFlags : uint32_t { kKeepPartial = 1, kRewritable = 2, kLastTask = 4 };

// What happens with a task, for those who wait and those who watch. Derived, but for the events since the store was
// made, which are relaxed atomics as Counters are.
struct alignas(64) TaskFigures {
  std::atomic<uint32_t> changes;    // the futex of those who wait for due rows
  std::atomic<uint32_t> waiting;    // threads asleep, and those that were killed asleep
  std::atomic<uint32_t> due;        // rows
  std::atomic<uint32_t> claimed;    // rows
  std::atomic<uint32_t> remaining;  // rows inserted that the task is not done for
  uint32_t reserved;
  std::atomic<uint64_t> done, released, deaths, set_back;  // events
};
static_assert(sizeof(TaskFigures) == 64);

// A thread whose put or append waits for a span.
struct SpaceWaiter {
  std::atomic<uint64_t> place;  // sequence of its row + 1; 0: nobody waits
  uint64_t units;               // of the span
  uint32_t thread;
  uint16_t slot;   // client
  uint8_t claims;  // the row is claimed, and others get on if the claim is given up
  uint8_t reserved;
};
static_assert(sizeof(SpaceWaiter) == 24);
constexpr uint32_t kMaxSpaceWaiters = 256;

// The tasks of a store. Number 0 is the insert, the last one has no fields; without tasks there is the insert alone.
struct TaskTable {
  uint32_t axis_count, task_count;  // task_count: without the insert
  uint64_t span_units;
  AxisRecord axes[kMaxAxes];
  TaskRecord tasks[kMaxTasks + 1];
  alignas(64) TaskFigures figures[kMaxTasks + 1];
  std::atomic<uint32_t> finished;       // no more rows will be inserted
  std::atomic<uint32_t> space_changes;  // the futex of those who wait for a row or a span
  std::atomic<uint32_t> space_waiting;  // threads asleep
  std::atomic<uint32_t> waiter_count;   // of `waiters`, those that wait
  uint32_t next_row;                    // where the search for a free row begins: rows are taken in a ring
  std::atomic<uint64_t> passed_before;  // the ring has passed over rows of lower sequences, which are the oldest ones
  std::atomic<uint64_t> under_way;      // rows
  std::atomic<uint64_t> taken;          // rows
  std::atomic<uint64_t> taken_before;   // no row is taken by a step from this one on
  std::atomic<uint64_t> saved_before;   // the step that was told last to be saved, plus 1; 0: none
  uint64_t asked_rows, asked_units;     // of the last insert that has found no room; 0: one has since
  std::atomic<uint64_t> dropped, given_up, set_back, revoked;  // rows, events
  uint32_t claims[kMaxClients];                                // of each client: rows claimed, and spans it is filling
  std::atomic<uint64_t> most_in_flight;                        // rows, the limiter's; 0: no limit
  std::atomic<uint64_t> max_stale;  // versions that a row may be behind the clock, + 1; 0: any number
  std::atomic<int64_t> clock;       // version of the policy that is trained
  std::atomic<uint64_t> stale;      // rows that were ended for their age
  // Of each client: rows whose last sample it drew for batches that are not finished.
  std::atomic<uint32_t> unfinished[kMaxClients];
  SpaceWaiter waiters[kMaxSpaceWaiters];
  std::atomic<uint64_t> change;  // number of the last change of a part; 0: there was none
  SpanIndex index;
};

// The word of a (row, task).
//   bits 63..62 state, 61..59 deaths, 58..51 client slot, 50..41 claim number, 39..0 first span
// or, of the last task, once a batch has taken the row: 63..62 state, 61..22 step, 21..0 place in the batch.
enum class TaskState : uint8_t { not_done = 0, claimed = 1, done = 2, taken = 3 };
constexpr uint32_t kMaxDeaths = 7, kClaimNumbers = 1024;
struct TaskWord {
  TaskState state = TaskState::not_done;
  uint8_t deaths = 0;
  uint8_t slot = 0;
  uint16_t claim = 0;
  uint64_t span = 0;

  static constexpr TaskWord of(uint64_t word) {
    return {static_cast<TaskState>(word >> 62), static_cast<uint8_t>(word >> 59 & 7),
            static_cast<uint8_t>(word >> 51 & 0xff), static_cast<uint16_t>(word >> 41 & 0x3ff),
            word & ((uint64_t{1} << 40) - 1)};
  }
  constexpr uint64_t packed() const {
    return static_cast<uint64_t>(state) << 62 | static_cast<uint64_t>(deaths & 7) << 59 |
           static_cast<uint64_t>(slot) << 51 | static_cast<uint64_t>(claim & 0x3ff) << 41 | span;
  }
};
// The number of the next claim. 0: nobody has claimed the row.
constexpr uint16_t next_claim(uint16_t claim) {
  return static_cast<uint16_t>(claim % (kClaimNumbers - 1) + 1);
}
static_assert(kMaxClients == 256);
constexpr int64_t kNoVersion = INT64_MIN;

// The word of the last task of a row that a batch has taken.
constexpr uint32_t kPlaceBits = 22;
constexpr uint64_t kMaxTakenSteps = uint64_t{1} << 40, kMaxPlaces = uint64_t{1} << kPlaceBits;
struct TakenWord {
  uint64_t step = 0, place = 0;

  static constexpr TakenWord of(uint64_t word) {
    return {word >> kPlaceBits & (kMaxTakenSteps - 1), word & (kMaxPlaces - 1)};
  }
  constexpr uint64_t packed() const {
    return static_cast<uint64_t>(TaskState::taken) << 62 | step << kPlaceBits | place;
  }
};

constexpr uint64_t kControlOffset = 4096;
constexpr uint64_t kPendingOffset = 6144;
constexpr uint64_t kNewPriorityOffset = 6400;
constexpr uint64_t kJournalOffset = 6656;
constexpr uint64_t kFieldsOffset = 8192;
constexpr uint64_t kClientsOffset = kFieldsOffset + kMaxFields * sizeof(FieldRecord);
constexpr uint64_t kRegionsOffset = kClientsOffset + kMaxClients * sizeof(Client);
static_assert(kPendingOffset + sizeof(PendingCommit) <= kNewPriorityOffset);
static_assert(kNewPriorityOffset + sizeof(NewPriority) <= kJournalOffset);
static_assert(kJournalOffset + sizeof(JournalControl) <= kFieldsOffset);
static_assert(kClientsOffset == 16384 && kRegionsOffset == 32768);

// The word of a row.
constexpr uint32_t generation_of(uint64_t word) {
  return static_cast<uint32_t>(word >> 32);
}
constexpr uint32_t priority_of(uint64_t word) {
  return static_cast<uint32_t>(word);
}
constexpr uint64_t make_word(uint32_t generation, uint32_t priority) {
  return static_cast<uint64_t>(generation) << 32 | priority;
}
constexpr bool is_committed(uint64_t word) {
  return (generation_of(word) & 1) != 0;
}

// A caller's description of a field and a store; plan_segment turns it into a header.
struct FieldSpec {
  std::string name;
  uint8_t dtype = 0;
  uint8_t itemsize = 0;
  bool timed = false;
  std::vector<uint32_t> shape;
  // As FieldRecord has them; of a store with axes or tasks.
  uint8_t axis = 0, task = 0, divides = 0;
  SpanKind kind = SpanKind::array;
};

struct TaskSpec {
  std::string name;
  std::vector<uint32_t> after;  // numbers of tasks, counted from 1
  uint32_t flags = 0;
};

struct StoreOptions {
  uint64_t capacity = 0;
  uint64_t max_rows = 0;  // 0: as many as the capacity
  uint64_t max_age_ns = 0;
  uint32_t max_times_sampled = 0;
  uint32_t priority_fraction_bits = 16;
  bool step_priorities = false;
  bool max_priority = false;  // what new rows and steps get: the largest priority so far
  Remover remover = Remover::fifo;
  uint32_t remover_field = 0;
  bool content_numbers = true;
  bool persist = false;
  bool reserve = true;
  Trust trust = Trust::user;
  double lock_timeout_s = 10.0;
  // With any of these rows have spans (kRowSpans).
  std::vector<std::string> axes;
  std::vector<TaskSpec> tasks;  // the last one has no fields
  uint64_t span_bytes = 0;
};

// The header and field records of a new segment. Throws schema for what no segment can hold.
// `table`: axes and tasks, of a store that has any; the rest of it is zero.
Header plan_segment(const std::vector<FieldSpec>& fields, const StoreOptions& options,
                    std::vector<FieldRecord>* records, TaskTable* table = nullptr);

// What makes two builds agree on every byte. Computed over the header (but for times and ids) and the records, and over
// axes and tasks where there are any.
uint64_t layout_fingerprint(const Header& header, const FieldRecord* records, const TaskTable* table = nullptr);

// The rows of a store that takes at most `bytes` of its file system, head, metadata and padding included; 0 when one
// row alone takes more. `options` without a capacity. Throws schema for fields that no segment can hold.
uint64_t rows_within(const std::vector<FieldSpec>& fields, StoreOptions options, uint64_t bytes);

}  // namespace geartrain
