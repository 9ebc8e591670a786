#include "segment/span_heap.h"

#include <algorithm>

#include "base/errors.h"

namespace geartrain {

namespace {

// Blocks that take() looks at in the span's own class, where not each is large enough. A look is a cache miss.
constexpr int kSpanLooks = 8;

}  // namespace

void SpanHeap::fail_damaged(const char* what, uint64_t unit) const {
  fail(ErrorKind::corrupt, "the spans are damaged: ", what, " ", unit, ", the region has ", units_, " units");
}

// Whether a block of that size and no unknown bits can start at `first`.
bool SpanHeap::sound(uint64_t first, uint64_t size) const {
  const uint64_t units = size & kSpanUnits;
  return (size & ~(kSpanUnits | kSpanFree | kSpanAfterFree)) == 0 && first != 0 && first < units_ && units != 0 &&
         units <= units_ - first;
}

// The units of a free block, which lie inside the region.
uint64_t SpanHeap::free_size(uint64_t first) const {
  if (first == 0 || first >= units_) fail_damaged("a free block would start at unit", first);
  const uint64_t size = get(size_word(first));
  if (!sound(first, size) || (size & kSpanFree) == 0 || (size & kSpanAfterFree) != 0) {
    fail_damaged("there is no free block at unit", first);
  }
  return size & kSpanUnits;
}

uint64_t SpanHeap::size_of(uint64_t first) const {
  if (first == 0 || first >= units_) fail_damaged("a span would start at unit", first);
  const uint64_t size = get(size_word(first));
  if (!sound(first, size) || (size & kSpanFree) != 0) fail_damaged("there is no span at unit", first);
  return size & kSpanUnits;
}

// The first class at or above `from` that has a block, else kSpanClasses.
uint32_t SpanHeap::next_class(uint32_t from) const {
  if (from >= kSpanClasses) return kSpanClasses;
  uint32_t at = from / 64;
  uint64_t classes = get(index_->classes[at]) >> (from % 64) << (from % 64);
  if (classes == 0) {
    const uint64_t words = get(index_->words) >> at >> 1 << at << 1;
    at = static_cast<uint32_t>(std::countr_zero(words));
    if (words == 0) return kSpanClasses;
    classes = at < kSpanClassWords ? get(index_->classes[at]) : 0;
    if (classes == 0) fail_damaged("no block is listed in class", uint64_t{at} * 64);
  }
  return at * 64 + static_cast<uint32_t>(std::countr_zero(classes));
}

// Calls found(first, units) for the first blocks of a class, until it returns true.
template <typename Found>
void SpanHeap::look(uint32_t of_class, Found&& found) const {
  uint64_t first = get(index_->blocks[of_class]);
  for (int i = 0; i < kSpanLooks && first != 0; ++i) {
    const uint64_t units = free_size(first);
    if (class_of(units) != of_class) fail_damaged("a block of another class is listed at unit", first);
    if (found(first, units)) return;
    first = get(next_word(first));
  }
}

// Makes a free block of units that belong to no block, and lists it.
void SpanHeap::link(uint64_t first, uint64_t units) {
  const uint32_t at = class_of(units);
  const uint64_t next = get(index_->blocks[at]);
  set(size_word(first), units | kSpanFree);
  set(last_word(first, units), units);
  set(next_word(first), next);
  set(previous_word(first), 0);
  if (next != 0) {
    free_size(next);
    set(previous_word(next), first);
  }
  set(index_->blocks[at], first);
  set(index_->classes[at / 64], get(index_->classes[at / 64]) | uint64_t{1} << (at % 64));
  set(index_->words, get(index_->words) | uint64_t{1} << (at / 64));
  set(index_->free_units, get(index_->free_units) + units);
}

// Takes a free block off its list and returns its units, which belong to no block until the caller has made one.
uint64_t SpanHeap::unlink(uint64_t first) {
  const uint64_t units = free_size(first);
  const uint32_t at = class_of(units);
  const uint64_t next = get(next_word(first)), previous = get(previous_word(first));
  if (next != 0) {
    free_size(next);
    if (get(previous_word(next)) != first) fail_damaged("a free block has a wrong back link, at unit", next);
  }
  if (previous != 0) free_size(previous);
  Word& link = previous == 0 ? index_->blocks[at] : next_word(previous);
  if (get(link) != first) fail_damaged("no list leads to the free block at unit", first);
  if (get(last_word(first, units)) != units) fail_damaged("a free block has two sizes, at unit", first);
  const uint64_t free = get(index_->free_units);
  if (free < units) fail_damaged("fewer units are counted as free than the block has at unit", first);

  set(link, next);
  if (next != 0) set(previous_word(next), previous);
  if (get(index_->blocks[at]) == 0) {
    const uint64_t classes = get(index_->classes[at / 64]) & ~(uint64_t{1} << (at % 64));
    set(index_->classes[at / 64], classes);
    if (classes == 0) set(index_->words, get(index_->words) & ~(uint64_t{1} << (at / 64)));
  }
  set(index_->free_units, free - units);
  return units;
}

// Tells the block at `unit`, which is a living one or the region's end, whether the one before it is free.
void SpanHeap::set_after_free(uint64_t unit, bool is_free) {
  if (unit == units_) return;
  const uint64_t size = get(size_word(unit));
  if (!sound(unit, size) || (size & kSpanFree) != 0 || ((size & kSpanAfterFree) != 0) == is_free) {
    fail_damaged("a block does not agree with the one before it, at unit", unit);
  }
  set(size_word(unit), size ^ kSpanAfterFree);
}

uint64_t SpanHeap::take(uint64_t units) {
  if (units == 0 || units >= units_) return 0;
  const uint32_t own = class_of(units);
  uint64_t first = 0;
  look(own, [&](uint64_t block, uint64_t size) {
    if (size >= units) first = block;
    return first != 0;
  });
  if (first == 0) {
    const uint32_t larger = next_class(own + 1);
    if (larger == kSpanClasses) return 0;
    look(larger, [&](uint64_t block, uint64_t) {
      first = block;
      return true;
    });
    if (first == 0) fail_damaged("no block is listed in class", larger);
  }
  const uint64_t found = unlink(first);
  if (found < units) fail_damaged("the size changed of the block at unit", first);
  if (found > units) {
    link(first + units, found - units);
  } else {
    set_after_free(first + units, false);
  }
  set(size_word(first), units);
  return first;
}

void SpanHeap::give(uint64_t first) {
  uint64_t units = size_of(first);
  const uint64_t after = first + units;
  if (after < units_ && (get(size_word(after)) & kSpanFree) != 0) {
    units += unlink(after);  // the block after both is marked already
  } else {
    set_after_free(after, true);
  }
  if ((get(size_word(first)) & kSpanAfterFree) != 0) {
    const uint64_t before = get(last_word(first, 0));
    if (before >= first || unlink(first - before) != before) fail_damaged("no free block ends before unit", first);
    first -= before;
    units += before;
  }
  link(first, units);
}

uint64_t SpanHeap::largest_free() const {
  const uint64_t words = get(index_->words);
  if (words == 0) return 0;
  const auto at = static_cast<uint32_t>(std::bit_width(words)) - 1;
  const uint64_t classes = at < kSpanClassWords ? get(index_->classes[at]) : 0;
  uint64_t largest = 0;
  if (classes != 0) {
    look(at * 64 + static_cast<uint32_t>(std::bit_width(classes)) - 1, [&](uint64_t, uint64_t units) {
      largest = std::max(largest, units);
      return false;
    });
  }
  if (largest == 0) fail_damaged("no block is listed in the largest class from", uint64_t{at} * 64);
  return largest;
}

void SpanHeap::rebuild(std::span<const Living> living) {
  uint64_t end = 1;
  for (const Living& span : living) {
    if (span.first < end || span.first >= units_)
      fail_damaged("a span overlaps another or is outside, at unit", span.first);
    if (span.units == 0 || span.units > units_ - span.first)
      fail_damaged("a span leaves the region, at unit", span.first);
    end = span.first + span.units;
  }
  set(index_->free_units, 0);
  set(index_->words, 0);
  for (Word& classes : index_->classes) set(classes, 0);
  for (Word& block : index_->blocks) set(block, 0);
  // From the end: free blocks at the region's start come first on their lists.
  end = units_;
  for (size_t i = living.size(); i-- > 0;) {
    const auto [first, units] = living[i];
    const uint64_t before = i == 0 ? 1 : living[i - 1].first + living[i - 1].units;
    if (first + units < end) link(first + units, end - first - units);
    set(size_word(first), units | (before < first ? kSpanAfterFree : 0));
    end = first;
  }
  if (end > 1) link(1, end - 1);
}

uint64_t SpanHeap::audit(const std::function<void(const std::string&)>& wrong, std::vector<Living>* living) const {
  uint64_t problems = 0;
  const auto report = [&](const auto&... parts) {
    ++problems;
    if (wrong) wrong(message_of({MessagePart(parts)...}));
  };
  std::vector<uint64_t> blocks, listed;
  uint64_t free = 0;
  bool after_free = false;
  for (uint64_t unit = 1; unit < units_;) {
    const uint64_t size = get(size_word(unit)), units = size & kSpanUnits;
    if (!sound(unit, size)) {
      report("the block at unit ", unit, " has no sound size");
      break;
    }
    const bool is_free = (size & kSpanFree) != 0;
    if (((size & kSpanAfterFree) != 0) != after_free) {
      report("the block at unit ", unit, " does not agree with the one before it");
    }
    if (is_free) {
      if (after_free) report("the free block at unit ", unit, " follows another free one");
      if (get(last_word(unit, units)) != units) report("the free block at unit ", unit, " has two sizes");
      blocks.push_back(unit);
      free += units;
    } else if (living != nullptr) {
      living->push_back({unit, units});
    }
    after_free = is_free;
    unit += units;
  }
  if (free != free_units()) report(free, " units are free, the count is ", free_units());

  uint64_t words = 0;
  for (uint32_t at = 0; at < kSpanClasses; ++at) {
    const uint64_t classes = get(index_->classes[at / 64]);
    words |= uint64_t{classes != 0} << (at / 64);
    if ((classes >> (at % 64) & 1) != uint64_t{get(index_->blocks[at]) != 0}) report("class ", at, " has a wrong bit");
    uint64_t previous = 0;
    for (uint64_t block = get(index_->blocks[at]); block != 0; block = get(next_word(block))) {
      const uint64_t size = block < units_ ? get(size_word(block)) : 0;
      // A block has one back link, so a list that runs in a circle or into another has a wrong one.
      if (!sound(block, size) || (size & kSpanFree) == 0 || class_of(size & kSpanUnits) != at ||
          get(previous_word(block)) != previous) {
        report("class ", at, " lists what is no block of it, at unit ", block);
        break;
      }
      listed.push_back(block);
      previous = block;
    }
  }
  if (words != get(index_->words)) report("the words of the classes' bits have wrong bits");
  std::sort(listed.begin(), listed.end());
  if (listed != blocks) report(listed.size(), " blocks are listed, ", blocks.size(), " are free or they differ");
  return problems;
}

}  // namespace geartrain
