// Fuzzer of encoded values: arbitrary bytes as a header, and buffers, are read as values within their bounds; and what
// they claim is never more than what they are, however it is nested.

#include <cstdlib>

#include "tests/support/fuzz.h"
#include "transport/value_reader.h"

namespace geartrain {
namespace {

constexpr uint32_t kMaxDepth = 64;

ValueReader::ItemSizes itemsizes() {
  ValueReader::ItemSizes sizes{};
  for (uint8_t code = 1; code <= 16; ++code) sizes[code] = static_cast<uint8_t>(1u << (code % 5));
  return sizes;
}

// Reads as the decoder does. What a decoder would allocate for claims is added up, and every byte that it gets is read.
struct Consumer {
  ValueReader& in;
  uint64_t claimed = 0, bytes = 0, touched = 0;

  void touch(Bytes part) {
    bytes += part.size();
    for (const std::byte byte : part) touched += static_cast<uint64_t>(byte);
  }
  void value(uint32_t depth) {
    switch (const char tag = in.tag(depth)) {
      case 'N':
      case 'T':
      case 'F':
        return;
      case 'i':
        static_cast<void>(in.number<int64_t>());
        return;
      case 'd':
        static_cast<void>(in.number<double>());
        return;
      case 'c':
        static_cast<void>(in.number<double>());
        static_cast<void>(in.number<double>());
        return;
      case 'I':
        return touch(in.digits());
      case 's':
      case 'b':
      case 'y':
        return touch(in.text());
      case 'B':
      case 'Y':
        return touch(in.buffer_of_bytes());
      case 'l':
      case 't':
      case 'e':
      case 'z':
      case 'm': {
        const uint32_t each = tag == 'm' ? 2 : 1;
        const uint32_t n = in.items(each);
        claimed += uint64_t{n} * each;
        for (uint64_t i = 0; i < uint64_t{n} * each; ++i) value(depth + 1);
        return;
      }
      case 'a':
      case 'A':
      case 'g': {
        const ValueReader::Array array = in.array(tag == 'g');
        uint64_t size = array.itemsize;
        for (const size_t axis : array.shape) size *= axis;
        if (size != array.elements.size() || array.shape.size() > kMostAxes) std::abort();
        return touch(array.elements);
      }
      case 'p': {
        const ValueReader::Pickle pickle = in.pickle();
        touch(pickle.text);
        for (const auto& buffer : pickle.buffers) touch(buffer);
        return;
      }
      case 'x':
        static_cast<void>(in.kind());
        ++claimed;
        return value(depth + 1);
      default:
        ValueReader::refuse("it holds a value of unknown type");
    }
  }
};

Input header(std::initializer_list<const char*> parts) {
  Input input = {2};
  for (const char* part : parts) input.insert(input.end(), part, part + std::strlen(part));
  return input;
}

void count(Input* input, char tag, uint32_t n) {
  input->push_back(static_cast<uint8_t>(tag));
  append(input, n);
}

}  // namespace

// The first byte says how many buffers there are, of which lengths: the same for all inputs.
std::vector<Input> fuzz_seeds() {
  std::vector<Input> seeds = {header({"N"}), header({"T"})};
  Input nested = {0};  // containers that each claim all that is left
  for (uint32_t i = 0; i < 60; ++i) count(&nested, "tlmez"[i % 5], 700 - 5 * i);
  nested.resize(1000, 'N');
  seeds.push_back(nested);
  Input items = {2};
  count(&items, 'm', 3);
  count(&items, 's', 2);
  items.insert(items.end(), {'a', 'b', 'i'});
  append(&items, int64_t{-1});
  count(&items, 'b', 3);
  items.insert(items.end(), {1, 2, 3, 'c'});
  append(&items, 1.5);
  append(&items, 2.5);
  items.push_back('N');
  count(&items, 'l', 2);
  items.insert(items.end(), {'a', 5, 2, 1});
  append(&items, uint64_t{2});
  append(&items, uint64_t{3});
  items.resize(items.size() + 6, 9);
  items.insert(items.end(), {'A', 5, 1, 0});
  append(&items, uint64_t{100});
  seeds.push_back(items);
  Input rest = {3};
  count(&rest, 't', 4);
  rest.insert(rest.end(), {'g', 1, 0, 1, 7, 7});
  count(&rest, 'I', 3);
  rest.insert(rest.end(), {1, 2, 3, 'B'});
  append(&rest, uint64_t{100});
  count(&rest, 'p', 4);
  append(&rest, uint32_t{1});
  rest.insert(rest.end(), {1, 2, 3, 4});
  seeds.push_back(rest);
  return seeds;
}

}  // namespace geartrain

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace geartrain;
  static const ValueReader::ItemSizes sizes = itemsizes();
  if (size == 0) return 0;
  // A copy of exactly that size, so that the sanitizer sees a byte too far.
  const std::vector<std::byte> copied(reinterpret_cast<const std::byte*>(data) + 1,
                                      reinterpret_cast<const std::byte*>(data) + size);
  std::vector<std::vector<std::byte>> memory;
  std::vector<std::span<std::byte>> buffers;
  for (uint8_t i = 0; i < data[0] % 4; ++i) memory.emplace_back(i == 1 ? 0 : 100);
  for (auto& one : memory) buffers.emplace_back(one);
  ValueReader reader(copied, buffers, sizes, kMaxDepth);
  Consumer consumer{reader};
  try {
    consumer.value(0);
    reader.finish();
  } catch (const Error& error) {
    if (error.kind != ErrorKind::frame) throw;
  }
  uint64_t most = copied.size();
  for (const auto& one : memory) most += one.size();
  if (consumer.claimed > copied.size() || consumer.bytes > most) std::abort();
  return 0;
}
