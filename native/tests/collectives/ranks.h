// Ranks as threads: a group of them over loopback, with or without reducers, and the expected result.
#pragma once

#include <barrier>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "collectives/group.h"
#include "collectives/reducer.h"
#include "tests/support/check.h"

namespace geartrain {

using Array = std::vector<std::byte>;

struct Crew {
  uint32_t world = 2;
  uint32_t reducers = 0;
  std::vector<double> shares;  // of the ranks, then of each thread of each reducer
  bool ring = false, shm = false;
  uint64_t fixed_window = 0;
  std::function<void(uint32_t rank, GroupOptions* options)> options = nullptr;  // further ones
  uint32_t reducer_threads = 1;
};

inline GroupOptions options_of(const Crew& crew, uint32_t rank, const std::vector<std::string>& reducers) {
  GroupOptions options;
  options.rank = rank;
  options.world = crew.world;
  options.reducers = reducers;
  options.shares = crew.shares;
  options.ring = crew.ring;
  options.shm = crew.shm;
  options.fixed_window_bytes = crew.fixed_window;
  if (crew.options) crew.options(rank, &options);
  return options;
}

// Makes the groups, one thread each, and runs the body on all. An exception on one is a failed check.
inline void run_ranks(const Crew& crew, const std::function<void(uint32_t rank, Group& group)>& body,
                      const std::vector<std::unique_ptr<Reducer>>* given = nullptr) {
  std::vector<std::unique_ptr<Reducer>> made;
  for (uint32_t i = 0; given == nullptr && i < crew.reducers; ++i) {
    made.push_back(std::make_unique<Reducer>(ReducerOptions{.shm = crew.shm, .threads = crew.reducer_threads}));
  }
  std::vector<std::string> reducers;
  for (const auto& reducer : given != nullptr ? *given : made) {
    for (uint32_t thread = 0; thread < crew.reducer_threads; ++thread) reducers.push_back(reducer->address());
  }
  std::vector<std::unique_ptr<Group>> groups;
  std::vector<std::string> addresses;
  for (uint32_t rank = 0; rank < crew.world; ++rank) {
    groups.push_back(std::make_unique<Group>(options_of(crew, rank, reducers)));
    addresses.push_back(groups.back()->address());
  }
  // A fault on one rank may end the connecting of a slower one: the bodies begin when all are connected.
  std::barrier<> connected(crew.world);
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < crew.world; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        try {
          groups[rank]->connect(addresses, soon(60));
        } catch (...) {
          connected.arrive_and_drop();
          throw;
        }
        connected.arrive_and_wait();
        body(rank, *groups[rank]);
        if (groups[rank] != nullptr) groups[rank]->close(soon(20));
      } catch (const std::exception& error) {
        testing::failed("rank", static_cast<int>(rank), "threw ", error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Shapes that cross every boundary: nothing, one, whole arrays, the first that is divided, odd ends.
inline std::vector<Shape> shapes(uint64_t seed, size_t n) {
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

// Numbers of any type that add up to interesting roundings, and never to a NaN.
inline Array numbers(uint64_t seed, Dtype dtype, uint64_t count) {
  if (is_complex(dtype)) return numbers(seed, dtype == Dtype::complex64 ? Dtype::float32 : Dtype::float64, 2 * count);
  std::mt19937_64 random(seed);
  Array out(count * bytes_of(dtype));
  if (!is_float(dtype)) {
    for (std::byte& byte : out) byte = static_cast<std::byte>(random());
    return out;
  }
  for (uint64_t i = 0; i < count; ++i) {
    const double value = std::ldexp(static_cast<double>(random() % 2001) - 1000.0, static_cast<int>(random() % 12) - 9);
    const auto narrow = static_cast<float>(value);
    if (dtype == Dtype::float64) {
      std::memcpy(out.data() + i * 8, &value, 8);
    } else {
      convert(Dtype::float32, reinterpret_cast<const std::byte*>(&narrow), dtype, out.data() + i * bytes_of(dtype), 1);
    }
  }
  return out;
}

// The expected result of the sharded all-reduce: all ranks' numbers, rounded to the wire, in the order of the ranks.
inline Array reference(uint64_t seed, uint32_t world, const Shape& shape) {
  std::vector<Array> wire(world);
  std::vector<const std::byte*> inputs;
  for (uint32_t rank = 0; rank < world; ++rank) {
    const Array own = numbers(seed + rank, shape.dtype, shape.count);
    wire[rank].resize(shape.wire_bytes());
    convert(shape.dtype, own.data(), shape.wire, wire[rank].data(), shape.count);
    inputs.push_back(wire[rank].data());
  }
  Array sum(shape.wire_bytes()), out(shape.count * bytes_of(shape.dtype));
  reduce(shape.op, shape.wire, inputs, sum.data(), shape.count);
  convert(shape.wire, sum.data(), shape.dtype, out.data(), shape.count);
  return out;
}

}  // namespace geartrain
