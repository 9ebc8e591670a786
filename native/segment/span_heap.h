// Allocator of spans: hands out runs of 64-byte units of a region in shared memory and takes them back.
//
//   unit    0        1               9        12                  40
//           | unused | span, 8 units | free 3 | span, 28 units ... |
//
// The region is divided into blocks without gaps. A block is a living span or free, and no two free blocks are
// neighbours: give() joins a block with the free ones on both sides. A block begins with its size and two flags.
//
//   living   SpanHead, then what its owner wrote
//   free     word 0: size and flags, word 1: next free block of its class, word 2: the one before,
//            last word: the size again, by which give() of the next block finds the first word
//
// take() is two-level good fit. A class holds the free blocks of one size up to 63 units, and above that of 32 classes
// for each power of two. take() looks at a few blocks of the span's own class, then splits the first block of the next
// larger class that has one, which a bitmap finds. A span gets exactly the units it asked for.
//
// One thread at a time may call, under the store's lock. A process may die inside any call: blocks and index are then
// made anew by rebuild() from the living spans. No call writes to a living span of others, except the flags in its
// `size`. Other processes can write to the region at any time, so each number is checked before it is followed:
// damage becomes Error(corrupt), after which rebuild() is due as well.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

namespace geartrain {

constexpr uint64_t kSpanUnit = 64;                        // bytes
constexpr uint64_t kSpanUnits = (uint64_t{1} << 40) - 1;  // SpanHead::size: the units of the block, head included
constexpr uint64_t kSpanFree = uint64_t{1} << 63;         // SpanHead::size: the block is free
constexpr uint64_t kSpanAfterFree = uint64_t{1} << 62;    // SpanHead::size: the block before it is free
constexpr uint32_t kSpanClasses = 1152;                   // of free blocks of 1 to kSpanUnits units
constexpr uint32_t kSpanClassWords = kSpanClasses / 64;

// The first unit of a span.
struct SpanHead {
  std::atomic<uint64_t> size;  // units and flags, above. All other fields are the owner's
  std::atomic<uint64_t> next;  // first unit of the next span of the chain; 0: none
  std::atomic<uint32_t> mark;
  uint32_t item;
  std::atomic<uint32_t> lengths[8];  // items of each axis
  uint32_t row;
  uint16_t task;
  uint8_t axis;
  uint8_t reserved;

  // Whose span it is, also for readers that may look at what was freed and is written anew.
  void set_owner(uint32_t of_row, uint16_t of_task) {
    std::atomic_ref(row).store(of_row, std::memory_order_relaxed);
    std::atomic_ref(task).store(of_task, std::memory_order_relaxed);
  }
  bool is_of(uint32_t of_row, uint32_t of_task) const {
    auto& its = const_cast<SpanHead&>(*this);
    return std::atomic_ref(its.row).load(std::memory_order_relaxed) == of_row &&
           std::atomic_ref(its.task).load(std::memory_order_relaxed) == of_task;
  }
};
static_assert(sizeof(SpanHead) == kSpanUnit);

// The free blocks by class. In shared memory; derived from the blocks. Valid after clear() or rebuild().
struct SpanIndex {
  std::atomic<uint64_t> free_units;
  std::atomic<uint64_t> words;                                 // a bit each: words of `classes` that are not zero
  std::array<std::atomic<uint64_t>, kSpanClassWords> classes;  // a bit each: classes that have blocks
  std::array<std::atomic<uint64_t>, kSpanClasses> blocks;      // first block of each class; 0: none
};
static_assert(sizeof(SpanIndex) == (2 + kSpanClassWords + kSpanClasses) * 8);
static_assert(std::atomic<uint64_t>::is_always_lock_free);

class SpanHeap {
 public:
  struct Living {
    uint64_t first, units;
  };

  SpanHeap() = default;
  // A view, not a copy. `region` is 64-byte aligned and has `units` units, at most kSpanUnits. Unit 0 is never handed
  // out.
  SpanHeap(SpanIndex* index, std::byte* region, uint64_t units) : index_(index), region_(region), units_(units) {}

  // Returns the first of `units` units, with the `size` of its head set and all else undefined; 0 if no free block is
  // large enough. A block of largest_free() units and less is found for certain. A block up to 1/32 larger than
  // `units` is missed at worst, if many others of its class that are too small come before it.
  uint64_t take(uint64_t units);
  // Frees a span. Throws corrupt for what cannot be a living span.
  void give(uint64_t first);
  // Frees everything.
  void clear() { rebuild({}); }
  // Makes the index, all free blocks and the sizes of living spans anew. `living` is sorted by `first`. Throws corrupt
  // and changes nothing if two overlap or one leaves the region.
  void rebuild(std::span<const Living> living);

  uint64_t units() const { return units_; }
  uint64_t free_units() const { return index_->free_units.load(std::memory_order_relaxed); }
  // Units that one take() finds for certain; at most 1/32 below the largest free block. Throws corrupt.
  uint64_t largest_free() const;
  // The unit as a head; nullptr for unit 0 and what is outside the region.
  SpanHead* head(uint64_t first) const {
    return first - 1 < units_ - 1 && units_ > 0 ? reinterpret_cast<SpanHead*>(region_ + first * kSpanUnit) : nullptr;
  }
  // Units of a living span, which lie inside the region. Throws corrupt for what cannot be one.
  uint64_t size_of(uint64_t first) const;

  // Walks all blocks and lists, tells what does not agree, and returns how much that was. Adds the living spans to
  // `living`. Allocates memory.
  uint64_t audit(const std::function<void(const std::string&)>& wrong, std::vector<Living>* living = nullptr) const;

 private:
  using Word = std::atomic<uint64_t>;

  static constexpr uint32_t class_of(uint64_t units) {
    const uint32_t shift = units < 64 ? 0 : static_cast<uint32_t>(std::bit_width(units)) - 6;
    return shift * 32 + static_cast<uint32_t>(units >> shift);
  }
  static uint64_t get(const Word& word) { return word.load(std::memory_order_relaxed); }
  static void set(Word& word, uint64_t value) { word.store(value, std::memory_order_relaxed); }

  Word& word(uint64_t unit, uint64_t index) const { return reinterpret_cast<Word*>(region_)[unit * 8 + index]; }
  Word& size_word(uint64_t first) const { return word(first, 0); }
  Word& next_word(uint64_t first) const { return word(first, 1); }
  Word& previous_word(uint64_t first) const { return word(first, 2); }
  Word& last_word(uint64_t first, uint64_t units) const { return word(first + units, uint64_t{0} - 1); }

  bool sound(uint64_t first, uint64_t size) const;
  uint64_t free_size(uint64_t first) const;
  uint32_t next_class(uint32_t from) const;
  template <typename Found>
  void look(uint32_t of_class, Found&& found) const;
  void link(uint64_t first, uint64_t units);
  uint64_t unlink(uint64_t first);
  void set_after_free(uint64_t unit, bool is_free);
  [[noreturn]] void fail_damaged(const char* what, uint64_t unit) const;

  SpanIndex* index_ = nullptr;
  std::byte* region_ = nullptr;
  uint64_t units_ = 0;
};

}  // namespace geartrain
