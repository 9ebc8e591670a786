// Collectives: arithmetic, sharded and ring all-reduce, over TCP and shared memory, and their failures.
// fails.

#include <cmath>
#include <map>

#include "collectives/reduce_kernels.h"
#include "collectives/sharded_allreduce.h"
#include "tests/collectives/ranks.h"

namespace geartrain {
namespace {

std::shared_ptr<Work> start(Group& group, const Shape& shape, Array* array, double timeout_s = 60) {
  return group.all_reduce(shape, array->data(), array->data(), timeout_s);
}

void finish(Work& work) {
  CHECK(work.wait(soon(90)));
  if (work.fault().kind != FaultKind::none) testing::failed(__FILE__, __LINE__, "failed: ", work.fault().text);
}

// Shapes that cross every boundary: nothing, one, whole arrays, the first that is divided, odd ends.
std::vector<Shape> shapes(uint64_t seed, size_t n) {
  std::mt19937_64 random(seed);
  constexpr uint64_t counts[] = {0, 1, 15, 4096, 4097, 8191, 20'000, 50'001};
  std::vector<Shape> out;
  for (size_t i = 0; i < n; ++i) {
    Shape shape;
    shape.dtype = static_cast<Dtype>(random() % kDtypes);
    shape.op = static_cast<Op>(random() % kOps);
    if (!reduces(shape.op, shape.dtype)) shape.op = Op::sum;
    shape.wire = shape.dtype;
    if (shape.dtype == Dtype::float32 && random() % 3 == 0) {
      shape.wire = random() % 2 == 0 ? Dtype::bfloat16 : Dtype::float16;
    }
    shape.count = i < std::size(counts) ? counts[i] : random() % 60'000;
    out.push_back(shape);
  }
  return out;
}

std::vector<double> random_shares(std::mt19937_64& random, size_t members) {
  std::vector<double> shares(members);
  double sum = 0;
  for (double& share : shares) sum += share = random() % 3 == 0 ? 0 : static_cast<double>(random() % 1000 + 1);
  if (sum == 0) sum = shares[random() % members] = 1;
  for (double& share : shares) share /= sum;
  return shares;
}

// --- arithmetic -----------------------------------------------------------------------------------------------------

template <typename T>
T at(const Array& array, size_t i) {
  T value;
  std::memcpy(&value, array.data() + i * sizeof(T), sizeof(T));
  return value;
}

TEST(a_sum_is_made_in_the_order_of_its_inputs) {
  for (const char* kernel : {"plain", "avx2", "avx512"}) {
    if (!set_reduce_kernel(kernel)) continue;
    for (const size_t n : {1u, 2u, 3u, 5u, 8u}) {
      std::vector<Array> arrays;
      std::vector<const std::byte*> inputs;
      for (size_t i = 0; i < n; ++i) arrays.push_back(numbers(i, Dtype::float32, 5003));
      for (const Array& array : arrays) inputs.push_back(array.data());
      Array sum(5003 * 4), avg(5003 * 4);
      reduce(Op::sum, Dtype::float32, inputs, sum.data(), 5003);
      reduce(Op::avg, Dtype::float32, inputs, avg.data(), 5003);
      size_t wrong = 0;
      for (size_t i = 0; i < 5003; ++i) {
        volatile float expected = at<float>(arrays[0], i);
        for (size_t k = 1; k < n; ++k) expected = expected + at<float>(arrays[k], i);
        wrong += at<float>(sum, i) != expected || at<float>(avg, i) != expected / static_cast<float>(n);
      }
      CHECK_EQ(wrong, 0u);
    }
  }
  set_reduce_kernel("plain");
}

TEST(all_kernels_give_the_same_bits) {
  for (const Shape& shape : shapes(5, 60)) {
    std::map<std::string, Array> results;
    for (const char* kernel : {"plain", "avx2", "avx512"}) {
      if (set_reduce_kernel(kernel)) results[kernel] = reference(9, 3, shape);
    }
    for (const auto& [name, result] : results) {
      if (result != results["plain"]) testing::failed(__FILE__, __LINE__, name, " differs for the ", shape.text());
    }
  }
}

// What C++ makes of three numbers, one after the other, modulo 2^bits for integers.
template <typename T>
T in_order(Op op, T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    volatile T out = op == Op::product ? a * b
                     : op == Op::min   ? std::min(a, b)
                     : op == Op::max   ? std::max(a, b)
                                       : a + b;
    return out;
  } else {
    const auto x = static_cast<unsigned __int128>(a), y = static_cast<unsigned __int128>(b);
    switch (op) {
      case Op::min:
        return std::min(a, b);
      case Op::max:
        return std::max(a, b);
      case Op::product:
        return static_cast<T>(x * y);
      case Op::band:
        return static_cast<T>(x & y);
      case Op::bor:
        return static_cast<T>(x | y);
      case Op::bxor:
        return static_cast<T>(x ^ y);
      default:
        return static_cast<T>(x + y);
    }
  }
}

template <typename T>
void check_in_order(Dtype dtype, uint64_t count) {
  std::vector<Array> arrays;
  std::vector<const std::byte*> inputs;
  for (uint64_t i = 0; i < 3; ++i) arrays.push_back(numbers(77 + i, dtype, count));
  for (const Array& array : arrays) inputs.push_back(array.data());
  for (uint8_t code = 0; code < kOps; ++code) {
    const Op op = static_cast<Op>(code);
    if (op == Op::avg || !reduces(op, dtype)) continue;
    Array out(count * sizeof(T));
    reduce(op, dtype, inputs, out.data(), count);
    size_t wrong = 0;
    for (size_t i = 0; i < count; ++i) {
      const T expected = in_order(op, in_order(op, at<T>(arrays[0], i), at<T>(arrays[1], i)), at<T>(arrays[2], i));
      wrong += at<T>(out, i) != expected;
    }
    if (wrong != 0) testing::failed(__FILE__, __LINE__, wrong, " differ: ", name_of(op), " of ", name_of(dtype));
  }
}

TEST(every_operation_is_that_of_the_language) {
  for (const char* kernel : {"plain", "avx2", "avx512"}) {
    if (!set_reduce_kernel(kernel)) continue;
    constexpr uint64_t kCount = 4099;
    check_in_order<float>(Dtype::float32, kCount);
    check_in_order<double>(Dtype::float64, kCount);
    check_in_order<int8_t>(Dtype::int8, kCount);
    check_in_order<int16_t>(Dtype::int16, kCount);
    check_in_order<int32_t>(Dtype::int32, kCount);
    check_in_order<int64_t>(Dtype::int64, kCount);
    check_in_order<uint8_t>(Dtype::uint8, kCount);
    check_in_order<uint16_t>(Dtype::uint16, kCount);
    check_in_order<uint32_t>(Dtype::uint32, kCount);
    check_in_order<uint64_t>(Dtype::uint64, kCount);
  }
  set_reduce_kernel("plain");
}

TEST(bool_is_true_where_it_is_not_zero) {
  for (const char* kernel : {"plain", "avx2", "avx512"}) {
    if (!set_reduce_kernel(kernel)) continue;
    std::vector<uint8_t> a(256 * 256), b(256 * 256), out(256 * 256);
    for (size_t i = 0; i < a.size(); ++i) a[i] = static_cast<uint8_t>(i / 256), b[i] = static_cast<uint8_t>(i % 256);
    const std::byte* const inputs[] = {reinterpret_cast<std::byte*>(a.data()), reinterpret_cast<std::byte*>(b.data())};
    for (uint8_t code = 0; code < kOps; ++code) {
      const Op op = static_cast<Op>(code);
      if (!reduces(op, Dtype::boolean)) continue;
      reduce(op, Dtype::boolean, inputs, reinterpret_cast<std::byte*>(out.data()), out.size());
      const bool is_and = op == Op::product || op == Op::min || op == Op::band;
      size_t wrong = 0;
      for (size_t i = 0; i < out.size(); ++i) {
        const bool x = a[i] != 0, y = b[i] != 0;
        wrong += out[i] != static_cast<uint8_t>(is_and ? x && y : op == Op::bxor ? x != y : x || y);
      }
      if (wrong != 0) testing::failed(__FILE__, __LINE__, wrong, " differ: ", name_of(op), " of bool");
    }
  }
  set_reduce_kernel("plain");
}

TEST(complex_numbers_are_pairs) {
  for (const Op op : {Op::sum, Op::avg}) {
    const Array a = numbers(1, Dtype::float32, 6002), b = numbers(2, Dtype::float32, 6002);
    const std::byte* const inputs[] = {a.data(), b.data()};
    Array pairs(a.size()), floats(a.size());
    reduce(op, Dtype::complex64, inputs, pairs.data(), 3001);
    reduce(op, Dtype::float32, inputs, floats.data(), 6002);
    CHECK(pairs == floats);
  }
  for (uint8_t op = 0; op < kOps; ++op) {
    CHECK_EQ(reduces(static_cast<Op>(op), Dtype::complex128), op <= static_cast<uint8_t>(Op::avg));
  }
}

TEST(sixteen_bits_are_rounded_to_nearest_even_once) {
  // Every half there is goes to float32 and back unchanged, NaNs to NaNs.
  for (const Dtype half : {Dtype::bfloat16, Dtype::float16}) {
    std::vector<uint16_t> all(65536), back(65536);
    for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
    std::vector<float> wide(65536);
    convert(half, reinterpret_cast<std::byte*>(all.data()), Dtype::float32, reinterpret_cast<std::byte*>(wide.data()),
            wide.size());
    convert(Dtype::float32, reinterpret_cast<std::byte*>(wide.data()), half, reinterpret_cast<std::byte*>(back.data()),
            wide.size());
    size_t wrong = 0;
    for (size_t i = 0; i < all.size(); ++i) wrong += !std::isnan(wide[i]) && all[i] != back[i];
    CHECK_EQ(wrong, 0u);
    // Half way between two neighbours goes to the even one; a little more goes up.
    wrong = 0;
    const int ends = half == Dtype::bfloat16 ? 0x7f7f : 0x7bff;
    for (int i = 0; i < ends; ++i) {
      const double middle = (static_cast<double>(wide[i]) + static_cast<double>(wide[i + 1])) / 2;
      const auto exact = static_cast<float>(middle);
      const float above = std::nextafter(exact, INFINITY);
      uint16_t narrow[2];
      const float values[2] = {exact, above};
      convert(Dtype::float32, reinterpret_cast<const std::byte*>(values), half, reinterpret_cast<std::byte*>(narrow),
              2);
      if (static_cast<double>(exact) == middle) wrong += narrow[0] != (i % 2 == 0 ? i : i + 1) || narrow[1] != i + 1;
    }
    CHECK_EQ(wrong, 0u);
  }
}

TEST(a_nan_is_passed_on_by_min_and_max) {
  const float nan = std::nanf("");
  const float a[4] = {nan, 1, 2, -0.0F}, b[4] = {1, nan, 3, 1};
  const std::byte* const inputs[] = {reinterpret_cast<const std::byte*>(a), reinterpret_cast<const std::byte*>(b)};
  float out[4];
  reduce(Op::min, Dtype::float32, inputs, reinterpret_cast<std::byte*>(out), 4);
  CHECK(std::isnan(out[0]) && std::isnan(out[1]) && out[2] == 2);
  reduce(Op::max, Dtype::float32, inputs, reinterpret_cast<std::byte*>(out), 4);
  CHECK(std::isnan(out[0]) && std::isnan(out[1]) && out[2] == 3 && out[3] == 1);
}

TEST(shares_cover_the_array_without_gaps) {
  std::mt19937_64 random(3);
  for (int i = 0; i < 300; ++i) {
    const auto shares = random_shares(random, 1 + random() % 20);
    const uint64_t count = i % 4 == 0 ? random() % 6000 : random() % 1'000'000;
    const auto starts = divide_array(count, Dtype::float32, shares, random() % 50);
    CHECK(starts.front() == 0 && starts.back() == count && std::is_sorted(starts.begin(), starts.end()));
    for (size_t owner = 0; owner < shares.size(); ++owner) {
      if (shares[owner] == 0) CHECK_EQ(starts[owner], starts[owner + 1]);
      const double exact = shares[owner] * static_cast<double>(count);
      if (count > 4096) CHECK(std::abs(static_cast<double>(starts[owner + 1] - starts[owner]) - exact) < 64);
    }
  }
}

// --- all-reduce -----------------------------------------------------------------------------------------------------

void reduces_right(const Crew& crew, uint64_t seed, size_t operations) {
  const auto all = shapes(seed, operations);
  std::vector<Array> expected;
  for (size_t i = 0; i < all.size(); ++i) expected.push_back(reference(seed + 100 * i, crew.world, all[i]));
  run_ranks(crew, [&](uint32_t rank, Group& group) {
    std::mt19937_64 random(seed + rank);
    std::vector<Array> arrays;
    for (size_t i = 0; i < all.size(); ++i)
      arrays.push_back(numbers(seed + 100 * i + rank, all[i].dtype, all[i].count));
    std::vector<std::shared_ptr<Work>> works;
    for (size_t i = 0; i < all.size(); ++i) {
      // Ranks start at different times, so parts of every operation come in every order.
      if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
      works.push_back(start(group, all[i], &arrays[i]));
      if (random() % 4 == 0) finish(*works.back());
    }
    for (size_t i = 0; i < all.size(); ++i) {
      finish(*works[i]);
      if (arrays[i] != expected[i]) {
        testing::failed(__FILE__, __LINE__, "rank ", rank, " of ", crew.world, ": wrong ", all[i].text());
      }
    }
  });
}

TEST(every_shape_on_any_number_of_ranks_is_the_rank_order_sum) {
  for (uint32_t world = 1; world <= 8; world += kThreadSanitizer ? 3 : 1) {
    reduces_right({.world = world}, world, 24);
  }
}

TEST(every_vector_of_shares_gives_the_same_bits) {
  std::mt19937_64 random(11);
  for (int i = 0; i < (kThreadSanitizer ? 3 : 8); ++i) {
    const auto world = static_cast<uint32_t>(1 + random() % 5), reducers = static_cast<uint32_t>(random() % 4);
    // The same seed: the same numbers and the same expected bits, whatever the shares.
    reduces_right({world, reducers, random_shares(random, world + reducers)}, 77, 14);
  }
}

TEST(memory_between_ranks_of_one_host_gives_the_same_bits) {
  if (kThreadSanitizer) return;  // it does not see two mappings of one memory as one
  reduces_right({.world = 2, .shm = true}, 21, 40);
  reduces_right({.world = 4, .shm = true}, 22, 30);
  reduces_right({3, 2, {0.1, 0.2, 0.1, 0.3, 0.3}, false, true}, 23, 30);
}

TEST(a_small_window_only_takes_longer) {
  reduces_right({.world = 3, .fixed_window = 4096}, 31, 12);
}

// The ring's documented order, computed plainly: piece p begins at rank p, each hop rounds to the wire.
Array ring_reference(uint64_t seed, uint32_t world, const Shape& shape) {
  std::vector<Array> own;
  for (uint32_t rank = 0; rank < world; ++rank) own.push_back(numbers(seed + rank, shape.dtype, shape.count));
  Array out(shape.count * bytes_of(shape.dtype));
  const uint64_t size = bytes_of(shape.dtype);
  for (uint32_t p = 0; p < world; ++p) {
    const uint64_t first = shape.count / 16 * p / world * 16;
    const uint64_t last = p + 1 == world ? shape.count : shape.count / 16 * (p + 1) / world * 16;
    const uint64_t count = last - first;
    Array sum(own[p].begin() + static_cast<ptrdiff_t>(first * size),
              own[p].begin() + static_cast<ptrdiff_t>(last * size));
    Array wire(count * bytes_of(shape.wire));
    const auto round_to_wire = [&] {
      convert(shape.dtype, sum.data(), shape.wire, wire.data(), count);
      convert(shape.wire, wire.data(), shape.dtype, sum.data(), count);
    };
    for (uint32_t k = 1; k < world; ++k) {
      round_to_wire();
      const std::byte* const both[] = {sum.data(), own[(p + k) % world].data() + first * size};
      reduce(shape.op == Op::avg ? Op::sum : shape.op, shape.dtype, both, sum.data(), count);
    }
    if (shape.op == Op::avg) divide(shape.dtype, sum.data(), count, world);
    if (world > 1) round_to_wire();
    std::copy(sum.begin(), sum.end(), out.begin() + static_cast<ptrdiff_t>(first * size));
  }
  return out;
}

TEST(the_ring_adds_up_in_its_documented_order) {
  for (uint32_t world = 1; world <= 6; world += kThreadSanitizer ? 2 : 1) {
    const auto all = shapes(40 + world, 20);
    run_ranks({.world = world, .ring = true}, [&](uint32_t rank, Group& group) {
      std::vector<Array> arrays;
      std::vector<std::shared_ptr<Work>> works;
      for (size_t i = 0; i < all.size(); ++i) {
        arrays.push_back(numbers(500 * i + rank, all[i].dtype, all[i].count));
      }
      for (size_t i = 0; i < all.size(); ++i) {
        works.push_back(start(group, all[i], &arrays[i]));
        if ((i + rank) % 5 == 0) std::this_thread::sleep_for(std::chrono::microseconds(500));
      }
      for (size_t i = 0; i < all.size(); ++i) {
        finish(*works[i]);
        if (arrays[i] != ring_reference(500 * i, world, all[i])) {
          testing::failed(__FILE__, __LINE__, "rank ", rank, " of ", world, ": wrong ", all[i].text());
        }
      }
    });
  }
}

// --- bytes ----------------------------------------------------------------------------------------------------------

double bytes_per_rank(const Crew& crew, uint64_t count) {
  std::atomic<uint64_t> most{0};
  run_ranks(crew, [&](uint32_t rank, Group& group) {
    Array array = numbers(rank, Dtype::float32, count);
    finish(*start(group, {count, Dtype::float32, Dtype::float32, Op::sum, 0}, &array));
    // What others still need of this rank is sent first.
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    const GroupCounts counts = group.counts();
    uint64_t seen = most;
    while (seen < counts.sent_tcp && !most.compare_exchange_weak(seen, counts.sent_tcp)) continue;
  });
  return static_cast<double>(most) / static_cast<double>(count * 4);
}

TEST(a_rank_sends_k_to_reducers_and_the_rings_bytes_to_ranks) {
  constexpr uint64_t kCount = 1 << 20;
  for (const uint32_t world : {2u, 4u}) {
    std::vector<double> shares(world + 2, 0.0);
    shares[world] = shares[world + 1] = 0.5;
    const double dedicated = bytes_per_rank({world, 2, shares}, kCount);
    CHECK(dedicated >= 1.0 && dedicated < 1.003);
    const double ring = 2.0 * (world - 1) / world;
    for (const bool by_ring : {false, true}) {
      const double equal = bytes_per_rank({.world = world, .ring = by_ring}, kCount);
      CHECK(equal >= ring && equal < ring * 1.003);
    }
  }
}

// --- failure --------------------------------------------------------------------------------------------------------

TEST(ranks_that_disagree_all_receive_the_same_fault) {
  for (const bool ring : {false, true}) {
    run_ranks({.world = 3, .ring = ring}, [&](uint32_t rank, Group& group) {
      Array array = numbers(rank, Dtype::float64, 30'000);
      Shape shape{30'000, Dtype::float64, Dtype::float64, Op::sum, 0};
      if (rank == 1) shape.count = 29'999;
      const auto work = start(group, shape, &array, 20);
      CHECK(work->wait(soon(30)));
      CHECK(work->fault().kind == FaultKind::disagree);
      CHECK(work->fault().text.find("29999") != std::string::npos);
      CHECK(work->fault().text.find("30000") != std::string::npos);
      CHECK(work->fault().text.find("rank 1") != std::string::npos);
      const auto next = start(group, shape, &array, 20);
      CHECK(next->wait(soon(5)) && next->fault().kind == FaultKind::disagree);
    });
  }
}

TEST(a_rank_that_does_not_join_is_named_at_the_deadline) {
  for (const bool ring : {false, true}) {
    for (const uint32_t reducers : {0u, 1u}) {
      if (ring && reducers != 0) continue;
      std::vector<double> shares;
      if (reducers != 0) shares = {0, 0, 0, 0, 1};
      std::atomic<int> waiting{3};
      run_ranks({4, reducers, shares, ring}, [&](uint32_t rank, Group& group) {
        if (rank == 2) {
          while (waiting > 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
          return;
        }
        Array array = numbers(rank, Dtype::float32, 100'000);
        const auto work = start(group, {100'000, Dtype::float32, Dtype::float32, Op::sum, 0}, &array, 3);
        CHECK(work->wait(soon(30)));
        CHECK(work->fault().kind == FaultKind::timed_out);
        CHECK(work->fault().members == std::vector<uint32_t>{2});
        --waiting;
      });
    }
  }
}

TEST(a_rank_that_leaves_is_named_by_those_who_go_on) {
  run_ranks({.world = 3}, [&](uint32_t rank, Group& group) {
    Array array = numbers(rank, Dtype::float32, 1000);
    finish(*start(group, {1000, Dtype::float32, Dtype::float32, Op::sum, 0}, &array));
    if (rank == 0) return;  // and closes
    const auto work = start(group, {1000, Dtype::float32, Dtype::float32, Op::sum, 0}, &array, 20);
    CHECK(work->wait(soon(10)));
    CHECK(work->fault().kind == FaultKind::rank_lost);
    CHECK(work->fault().text.find("rank 0") != std::string::npos);
  });
}

TEST(a_reducer_that_stops_is_named) {
  std::vector<std::unique_ptr<Reducer>> reducers;
  for (int i = 0; i < 2; ++i) reducers.push_back(std::make_unique<Reducer>(ReducerOptions{.shm = false}));
  const std::string address = reducers[1]->address();
  std::atomic<int> begun{0};
  run_ranks(
      {2, 2, {0, 0, 0.5, 0.5}},
      [&](uint32_t rank, Group& group) {
        Array array = numbers(rank, Dtype::float32, 100'000);
        const Shape shape{100'000, Dtype::float32, Dtype::float32, Op::sum, 0};
        finish(*start(group, shape, &array));
        for (++begun; begun < 2;) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        if (rank == 0) reducers[1]->close(Deadline::after(0));
        const auto work = start(group, shape, &array, 20);
        CHECK(work->wait(soon(10)));
        CHECK(work->fault().kind == FaultKind::reducer_lost);
        CHECK(work->fault().text.find(address) != std::string::npos);
      },
      &reducers);
}

TEST(an_abort_ends_the_group_everywhere_with_its_reason) {
  run_ranks({.world = 3}, [&](uint32_t rank, Group& group) {
    Array array = numbers(rank, Dtype::float32, 100'000);
    if (rank == 0) {
      group.abort("out of cheese");
      return;
    }
    const auto work = start(group, {100'000, Dtype::float32, Dtype::float32, Op::sum, 0}, &array, 20);
    CHECK(work->wait(soon(10)));
    CHECK(work->fault().text.find("out of cheese") != std::string::npos);
  });
}

TEST(one_reducer_serves_many_groups_and_a_failed_group_affects_no_other) {
  std::vector<std::unique_ptr<Reducer>> reducers;
  reducers.push_back(std::make_unique<Reducer>(ReducerOptions{.shm = false}));
  std::vector<std::thread> crews;
  for (int crew = 0; crew < 4; ++crew) {
    crews.emplace_back([&, crew] {
      run_ranks(
          {2, 1, {0, 0, 1}},
          [&](uint32_t rank, Group& group) {
            for (int i = 0; i < 20; ++i) {
              Shape shape{20'000, Dtype::float32, Dtype::float32, Op::sum, 0};
              Array array = numbers(rank + 7 * i, Dtype::float32, 20'000);
              if (crew == 0 && i == 3 && rank == 1) shape.count = 19'000;
              const auto work = start(group, shape, &array, 20);
              CHECK(work->wait(soon(30)));
              if (crew == 0 && i >= 3) {
                CHECK(work->fault().kind == FaultKind::disagree);
              } else {
                CHECK(work->fault().kind == FaultKind::none && array == reference(7 * i, 2, shape));
              }
            }
          },
          &reducers);
    });
  }
  for (std::thread& crew : crews) crew.join();
  for (int i = 0; i < 100 && reducers[0]->counts().groups != 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  const ReducerCounts counts = reducers[0]->counts();
  CHECK_EQ(counts.groups, 0u);
  CHECK_EQ(counts.groups_served, 4u);
  CHECK_EQ(counts.groups_failed, 1u);
  CHECK_EQ(counts.memory_bytes, 0u);
}

TEST(a_reducer_holds_windows_and_not_arrays) {
  std::vector<std::unique_ptr<Reducer>> reducers;
  reducers.push_back(std::make_unique<Reducer>(ReducerOptions{.shm = false, .max_window_bytes = 1 << 20}));
  std::atomic<uint64_t> most{0};
  std::atomic<bool> over{false};
  std::thread watcher([&] {
    while (!over) {
      most = std::max(most.load(), reducers[0]->counts().memory_bytes);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  run_ranks(
      {2, 1, {0, 0, 1}},
      [&](uint32_t rank, Group& group) {
        Array array = numbers(rank, Dtype::float32, 8 << 20);
        if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(300));
        finish(*start(group, {8 << 20, Dtype::float32, Dtype::float32, Op::sum, 0}, &array));
      },
      &reducers);
  over = true;
  watcher.join();
  CHECK(most > 0 && most < (4u << 20));  // of 64 MB
}

TEST(an_unauthenticated_rank_is_refused_and_counted) {
  ReducerOptions options;
  options.secret = "the right one";
  std::vector<std::unique_ptr<Reducer>> reducers;
  reducers.push_back(std::make_unique<Reducer>(options));
  GroupOptions asks;
  asks.reducers = {reducers[0]->address()};
  asks.shares = {0, 1};
  asks.secret = "the wrong one";
  Group group(asks);
  CHECK_THROWS(untrusted, group.connect({group.address()}, soon(5)));
  // The listener counts once it has seen what the dialer has seen already.
  for (const Deadline late = soon(); reducers[0]->counts().refused == 0 && !late.passed();) ::usleep(1000);
  CHECK(reducers[0]->counts().refused >= 1);
  asks.secret = "the right one";
  Group right(asks);
  right.connect({right.address()}, soon(5));
  Array array = numbers(1, Dtype::float32, 100'000), same = array;
  finish(*start(right, {100'000, Dtype::float32, Dtype::float32, Op::sum, 0}, &array));
  CHECK(array == same);
  right.close(soon(5));
  CHECK_THROWS(untrusted, Reducer(ReducerOptions{.host = "0.0.0.0"}));
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
