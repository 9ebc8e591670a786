// The allocator of spans against a map of living spans, when full, after a rebuild, and in damaged memory.

#include "segment/span_heap.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>
#include <memory>
#include <random>
#include <thread>

#include "tests/support/check.h"

namespace geartrain {
namespace {

constexpr uint64_t kWordsOfUnit = kSpanUnit / 8;

struct HeapMemory {
  explicit HeapMemory(uint64_t units, uint64_t rubbish = 0)
      : units(units),
        region(static_cast<uint64_t*>(std::aligned_alloc(kSpanUnit, units * kSpanUnit)), &std::free),
        index(std::make_unique<SpanIndex>()),
        heap(index.get(), reinterpret_cast<std::byte*>(region.get()), units) {
    std::mt19937_64 random(rubbish);
    for (uint64_t i = 0; i < units * kWordsOfUnit; ++i) region.get()[i] = rubbish == 0 ? 0 : random();
    heap.clear();
  }

  uint64_t take(uint64_t size) {
    const uint64_t first = heap.take(size);
    if (first == 0) return 0;
    const auto next = living.lower_bound(first);
    CHECK(first > 0 && first + size <= units);
    CHECK(next == living.end() || first + size <= next->first);
    CHECK(next == living.begin() || std::prev(next)->first + std::prev(next)->second <= first);
    CHECK_EQ(heap.size_of(first), size);
    living[first] = size;
    for (uint64_t i = 1; i < size * kWordsOfUnit; ++i) region.get()[first * kWordsOfUnit + i] = first * 7919 + i;
    return first;
  }
  void give(uint64_t first) {
    // Nobody has written to it.
    for (uint64_t i = 1; i < living[first] * kWordsOfUnit; ++i) {
      if (region.get()[first * kWordsOfUnit + i] != first * 7919 + i) testing::failed(__FILE__, __LINE__, "word ", i);
    }
    CHECK_EQ(heap.size_of(first), living[first]);
    heap.give(first);
    living.erase(first);
  }
  uint64_t random_living(std::mt19937_64& random) {
    const auto next = living.lower_bound(random() % units);
    return next == living.end() ? living.begin()->first : next->first;
  }
  std::vector<SpanHeap::Living> spans() const {
    std::vector<SpanHeap::Living> all;
    for (const auto& [first, size] : living) all.push_back({first, size});
    return all;
  }
  // Largest of the gaps between the living spans, and the sum of all.
  std::pair<uint64_t, uint64_t> gaps() const {
    uint64_t largest = 0, sum = 0, end = 1;
    const auto gap = [&](uint64_t first) {
      largest = std::max(largest, first - end);
      sum += first - end;
    };
    for (const auto& [first, size] : living) {
      gap(first);
      end = first + size;
    }
    gap(units);
    return {largest, sum};
  }
  // The heap is whole and has exactly the spans of the map.
  void check() const {
    std::vector<SpanHeap::Living> found;
    const uint64_t problems =
        heap.audit([](const std::string& what) { testing::failed(__FILE__, __LINE__, what); }, &found);
    CHECK_EQ(problems, uint64_t{0});
    CHECK_EQ(found.size(), living.size());
    for (const SpanHeap::Living& span : found)
      CHECK(living.count(span.first) == 1 && living.at(span.first) == span.units);
    const auto [largest, sum] = gaps();
    CHECK_EQ(heap.free_units(), sum);
    CHECK(heap.largest_free() <= largest && heap.largest_free() * 33 >= largest * 32);
  }

  uint64_t units;
  std::unique_ptr<uint64_t, void (*)(void*)> region;
  std::unique_ptr<SpanIndex> index;
  SpanHeap heap;
  std::map<uint64_t, uint64_t> living;
};

// 1 to `most` units, small ones as often as large ones.
uint64_t random_units(std::mt19937_64& random, uint64_t most) {
  return 1 + random() % (uint64_t{1} << (random() % std::bit_width(most)));
}

TEST(spans_neither_overlap_nor_are_lost_whatever_is_taken_and_given) {
  for (const uint64_t units : {2, 3, 64, 1000, 5000}) {
    std::mt19937_64 random(units);
    HeapMemory memory(units, units);
    memory.check();
    for (int i = 0; i < 4000; ++i) {
      if (memory.living.empty() || random() % 100 < (i / 500 % 2 == 0 ? 70u : 40u)) {
        const uint64_t size = random_units(random, units);
        const auto [largest, sum] = memory.gaps();
        const uint64_t certain = memory.heap.largest_free();
        const uint64_t first = memory.take(size);
        CHECK(first != 0 ? size <= largest : size > certain && size * 33 > largest * 32);
      } else {
        memory.give(memory.random_living(random));
      }
      if (i % 64 == 0) memory.check();
    }
    while (!memory.living.empty()) memory.give(memory.random_living(random));
    memory.check();
    CHECK_EQ(memory.heap.largest_free(), units - 1);  // one block again
  }
}

TEST(a_region_is_filled_to_its_last_unit) {
  HeapMemory memory(1 + 17 * 60);
  for (const uint64_t size : {1, 2, 17}) {
    for (uint64_t i = 0; i < 17 * 60 / size; ++i) CHECK(memory.take(size) != 0);
    CHECK_EQ(memory.heap.free_units(), uint64_t{0});
    CHECK_EQ(memory.heap.largest_free(), uint64_t{0});
    CHECK_EQ(memory.take(1), uint64_t{0});
    memory.check();
    // Every second one, then the others: each joins the free blocks on both sides.
    for (const uint64_t odd : {1, 0}) {
      for (uint64_t i = odd; i < 17 * 60 / size; i += 2) memory.give(1 + i * size);
      memory.check();
    }
    CHECK_EQ(memory.heap.largest_free(), memory.units - 1);
  }
  CHECK_EQ(memory.take(memory.units - 1), uint64_t{1});
  memory.give(1);
  CHECK_EQ(memory.take(0), uint64_t{0});
  CHECK_EQ(memory.take(memory.units), uint64_t{0});
  CHECK_EQ(memory.take(~uint64_t{0}), uint64_t{0});
}

TEST(a_full_region_loses_little_to_fragments) {
  // Rows of 5 to 320 units, 80 in the mean. One that does not fit waits until enough random ones were freed.
  HeapMemory memory(uint64_t{1} << 17);
  std::mt19937_64 random(1);
  std::lognormal_distribution<double> lognormal(std::log(80) - 0.25, 0.7);
  std::vector<std::pair<uint64_t, uint64_t>> rows;
  std::vector<uint64_t> free;  // units, each time that one did not fit
  for (uint64_t taken = 0; taken < 6 * memory.units;) {
    const uint64_t units = std::clamp<uint64_t>(static_cast<uint64_t>(lognormal(random)), 5, 320);
    uint64_t first;
    while ((first = memory.heap.take(units)) == 0) {
      free.push_back(memory.heap.free_units());
      std::swap(rows[random() % rows.size()], rows.back());
      memory.heap.give(rows.back().first);
      rows.pop_back();
    }
    rows.push_back({first, units});
    taken += units;
  }
  std::sort(free.begin(), free.end());
  // 7 % here; 18 % if take() splits the largest block.
  CHECK(free[free.size() / 2] < memory.units / 10);
}

TEST(spans_of_a_terabyte_have_classes) {
  // Only first and last pages of blocks are touched. A process that a sanitizer watches cannot reserve as much.
  const uint64_t units = kThreadSanitizer || kAddressSanitizer ? uint64_t{1} << 20 : uint64_t{1} << 34;
  void* const region =
      ::mmap(nullptr, units * kSpanUnit, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  CHECK(region != MAP_FAILED);
  const auto index = std::make_unique<SpanIndex>();
  SpanHeap heap(index.get(), static_cast<std::byte*>(region), units);
  heap.clear();
  std::vector<uint64_t> taken;
  for (uint64_t size = 1; size < units / 2; size = size * 33 / 32 + 1) taken.push_back(heap.take(size));
  for (const uint64_t first : taken) {
    if (first != 0) heap.give(first);
  }
  CHECK_EQ(heap.audit(nullptr), uint64_t{0});
  CHECK_EQ(heap.largest_free(), units - 1);
  ::munmap(region, units * kSpanUnit);
}

TEST(a_rebuild_from_the_living_spans_leaves_the_same_free_space) {
  for (int round = 0; round < 60; ++round) {
    std::mt19937_64 random(round);
    HeapMemory memory(2 + random() % 2000, 1);
    for (int i = 0; i < 300; ++i) {
      if (memory.living.empty() || random() % 3 != 0)
        memory.take(random_units(random, memory.units / 4 + 1));
      else
        memory.give(memory.random_living(random));
    }
    if (round % 10 == 0) memory.living.clear();
    // The process died in the middle of something: what the region and the index say is no longer true.
    const std::vector<SpanHeap::Living> spans = memory.spans();
    uint64_t end = 1;
    const auto scribble = [&](uint64_t to) {
      for (uint64_t i = end * kWordsOfUnit; i < to * kWordsOfUnit; ++i) memory.region.get()[i] = random();
    };
    for (const SpanHeap::Living& span : spans) {
      scribble(span.first);
      end = span.first + span.units;
      memory.region.get()[span.first * kWordsOfUnit] ^= random() & (kSpanFree | kSpanAfterFree);
    }
    scribble(memory.units);
    for (uint64_t i = 0; i < sizeof(SpanIndex) / 8; ++i) reinterpret_cast<uint64_t*>(memory.index.get())[i] = random();
    memory.heap.rebuild(spans);
    memory.check();
    while (!memory.living.empty()) memory.give(memory.random_living(random));
    CHECK_EQ(memory.heap.largest_free(), memory.units - 1);
  }
}

TEST(a_rebuild_refuses_spans_that_overlap_or_leave_the_region) {
  HeapMemory memory(100);
  memory.take(10);
  const uint64_t most = ~uint64_t{0};
  for (const std::vector<SpanHeap::Living>& wrong : std::vector<std::vector<SpanHeap::Living>>{{{0, 1}},
                                                                                               {{1, 0}},
                                                                                               {{1, 100}},
                                                                                               {{99, 2}},
                                                                                               {{100, 1}},
                                                                                               {{50, most}},
                                                                                               {{most, 2}},
                                                                                               {{5, 5}, {9, 1}},
                                                                                               {{9, 1}, {5, 1}}}) {
    CHECK_THROWS(corrupt, memory.heap.rebuild(wrong));
    memory.check();  // and changes nothing
  }
}

TEST(what_is_no_living_span_cannot_be_given) {
  HeapMemory memory(100);
  const uint64_t a = memory.take(10), b = memory.take(1), c = memory.take(20);
  memory.give(b);
  for (const uint64_t wrong : {uint64_t{0}, b, c + 20, uint64_t{100}, uint64_t{1} << 50, ~uint64_t{0}}) {
    CHECK_THROWS(corrupt, memory.heap.give(wrong));
    CHECK_THROWS(corrupt, memory.heap.size_of(wrong));
    CHECK_EQ(memory.heap.head(wrong) == nullptr, wrong == 0 || wrong >= 100);
    memory.check();
  }
  // A size that ends inside another block or outside, or has unknown bits.
  for (const uint64_t size :
       {uint64_t{0}, uint64_t{9}, uint64_t{11}, uint64_t{100}, kSpanUnits, 10 | uint64_t{1} << 40}) {
    memory.heap.head(a)->size = size;
    CHECK_THROWS(corrupt, memory.heap.give(a));
  }
  memory.heap.head(a)->size = 10;
  memory.check();
  memory.give(a);
  memory.give(c);
  memory.check();
}

// The part of a heap that is damaged, and by what.
uint64_t bad_number(std::mt19937_64& random, uint64_t was, uint64_t units) {
  switch (random() % 6) {
    case 0:
      return random();
    case 1:
      return random() % (units + 2);
    case 2:
      return was ^ uint64_t{1} << (random() % 64);
    case 3:
      return (random() % units) | (random() % 4) << 62;
    case 4:
      return was + random() % 5 - 2;
    default:
      return random() % 2 == 0 ? 0 : ~uint64_t{0};
  }
}

TEST(damage_becomes_an_error_or_does_no_harm_and_a_rebuild_mends_it) {
  int refused = 0, reported = 0;
  constexpr int kRounds = 4000;
  for (int round = 0; round < kRounds; ++round) {
    std::mt19937_64 random(round);
    HeapMemory memory(20 + random() % 400, 1);
    uint64_t* const region = memory.region.get();
    for (int i = 0; i < 60; ++i) {
      if (memory.living.empty() || random() % 5 < 3)
        memory.take(random_units(random, 40));
      else
        memory.give(memory.random_living(random));
    }
    const std::vector<SpanHeap::Living> spans = memory.spans();
    for (uint64_t damage = 1 + random() % 4; damage > 0; --damage) {
      auto* const index = reinterpret_cast<uint64_t*>(memory.index.get());
      const uint64_t block =
          memory.living.empty() || random() % 2 == 0 ? random() % memory.units : memory.random_living(random);
      const uint64_t at = random() % 4;
      uint64_t* const word = at == 0   ? index + random() % 20                         // counts and bits
                             : at == 1 ? index + 20 + random() % 128                   // small classes' lists
                             : at == 2 ? region + block * kWordsOfUnit + random() % 3  // size and links
                                       : region + block * kWordsOfUnit + kWordsOfUnit - 1;
      *word = bad_number(random, *word, memory.units);
    }
    reported += memory.heap.audit(nullptr) != 0;
    const auto attempt = [&](auto&& call) {
      try {
        call();
      } catch (const Error& error) {
        CHECK(error.kind == ErrorKind::corrupt);
        ++refused;
      }
    };
    for (int i = 0; i < 60; ++i) {
      attempt([&] { memory.heap.take(random_units(random, 40)); });
      attempt([&] {
        memory.heap.give(random() % 3 == 0 || spans.empty() ? random() % memory.units
                                                            : spans[random() % spans.size()].first);
      });
      attempt([&] { memory.heap.largest_free(); });
    }
    memory.heap.audit(nullptr);
    memory.heap.rebuild(spans);
    memory.check();
  }
  CHECK(refused > kRounds);
  CHECK(reported > kRounds / 2);
}

TEST(a_size_that_changes_during_a_call_leads_nowhere) {
  // The free block at unit 1 has 10 units or 30, and a list and a last word for both. Joined with the span of 20 units
  // at unit 11, the region's last, 30 would end outside.
  HeapMemory memory(31);
  auto* const words = reinterpret_cast<std::atomic<uint64_t>*>(memory.region.get());
  std::atomic<bool> done{false};
  std::thread writer([&] {
    while (!done) {
      for (const uint64_t units : {10, 30}) words[kWordsOfUnit] = units | kSpanFree;
    }
  });
  for (int i = 0; i < 100'000; ++i) {
    try {
      memory.heap.rebuild(std::vector<SpanHeap::Living>{{11, 20}});
      words[31 * kWordsOfUnit - 1] = 30;
      memory.index->blocks[30] = memory.index->blocks[10] = 1;
      memory.index->free_units = 30;
      memory.heap.give(11);
      CHECK_EQ(memory.index->blocks[50].load(), uint64_t{0});  // which would be 30 + 20 units
    } catch (const Error& error) {
      CHECK(error.kind == ErrorKind::corrupt);
    }
  }
  done = true;
  writer.join();
  memory.heap.clear();
  memory.check();
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
