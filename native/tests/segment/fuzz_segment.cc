// Fuzzer of segments: a file of any content under a store's name, and a file whose lists change under the store that
// has it open. Errors are the expected end; what the sanitizers find is not, nor is a hang.

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

#include "base/errors.h"
#include "fetch/fetch.h"
#include "selection/selection.h"
#include "store/store.h"
#include "tests/support/fuzz.h"

namespace geartrain {
namespace {

constexpr uint64_t kRows = 8;

std::string scratch(const char* what) {
  return "/dev/shm/geartrain-fuzz-segment." + std::to_string(::getpid()) + "." + what;
}

std::vector<FieldSpec> fields_of_seed() {
  return {{"x", 12, 4, true, {3, 2}}, {"id", 9, 8, false, {}}};
}

Input contents(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  Input bytes(static_cast<size_t>(::lseek(fd, 0, SEEK_END)));
  if (::pread(fd, bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) std::abort();
  ::close(fd);
  return bytes;
}

// Real segments: closed in an orderly way with rows in them, and copied from under a client that was writing.
std::vector<Input> make_images() {
  std::vector<Input> images;
  for (const Remover remover : {Remover::fifo, Remover::lowest_priority}) {
    for (const uint32_t samples : {0u, 2u}) {
      const std::string path = scratch("seed");
      StoreOptions options;
      options.capacity = kRows;
      options.remover = remover;
      options.max_times_sampled = samples;
      options.persist = true;
      auto store = Store::create(path, fields_of_seed(), options);
      uint32_t rows[5], generations[5];
      store->allocate(rows);
      store->commit({rows, 3}, {}, {generations, 3});
      uint8_t taken[1];
      for (int i = 0; i < 2; ++i) store->count_samples({rows, 1}, {generations, 1}, taken);
      if (samples == 0) store->publish({rows + 3, 1}, {}, {generations + 3, 1});
      images.push_back(contents(path));
      store->close();
      images.push_back(contents(path));
      ::unlink(path.c_str());
    }
  }
  return images;
}

const std::vector<Input>& images() {
  static const auto* made = new std::vector<Input>(make_images());
  return *made;
}

// An input: u8 which image, u8 what is done to it, u8 patches before the open, u8 patches after it, then the patches:
// u8 place, u8 offset in it, u8 bytes, the bytes. Small, so that a mutation of it is one of the segment's telling
// parts.
struct Place {
  uint64_t offset, stride;
};
constexpr Place kPlaces[] = {
    {0, 4},                          // header
    {112, 4},                        // regions
    {kControlOffset + 64, 4},        // lists' ends and counts; the mutex is tested by a byte of `what`
    {kFieldsOffset, 4},              // field records
    {kClientsOffset, 4},             // the first clients
    {kRegionsOffset, 4},             // row status
    {kRegionsOffset + 4096, 4},      // words
    {kRegionsOffset + 2 * 4096, 8},  // priority nodes
    {kRegionsOffset + 3 * 4096, 4},  // bits
    {kRegionsOffset + 4 * 4096, 8},  // bit nodes
    {kRegionsOffset + 5 * 4096, 4},  // heap, or the first column
    {0, 256},                        // anywhere
};
enum What : uint8_t { kAdopt = 1, kReadOnly = 2, kRefit = 4, kShorter = 8, kLonger = 16, kMutex = 32 };

void patch(Reader* from, uint8_t* bytes, uint64_t size, bool open) {
  const Place place = kPlaces[from->take<uint8_t>() % std::size(kPlaces)];
  const uint64_t at = place.offset + from->take<uint8_t>() * place.stride;
  const auto with = from->take(from->take<uint8_t>() % 17);
  const auto touches = [&](uint64_t first, uint64_t bytes) { return at < first + bytes && at + with.size() > first; };
  // A lock that changes under its holder is the C library's to break, and nobody can bound that. And a client that is
  // said to be in the middle of an update is waited for, until the deadline.
  if (open && touches(kControlOffset, sizeof(pthread_mutex_t))) return;
  for (uint64_t slot = 0; open && slot < kMaxClients; ++slot) {
    if (touches(kClientsOffset + slot * sizeof(Client) + offsetof(Client, priority_writers), 4)) return;
  }
  if (at < size) std::memcpy(bytes + at, with.data(), std::min<uint64_t>(with.size(), size - at));
}

void refit(Input* image) {
  Header header;
  if (image->size() < kRegionsOffset) return;
  std::memcpy(&header, image->data(), sizeof header);
  header.segment_bytes = image->size();
  header.field_count = header.field_count % (kMaxFields + 1);
  header.fingerprint = layout_fingerprint(header, reinterpret_cast<const FieldRecord*>(image->data() + kFieldsOffset));
  std::memcpy(image->data(), &header, sizeof header);
}

// Whatever it throws, errors of the library alone.
template <typename Call>
void attempt(Call&& call) {
  try {
    call();
  } catch (const Error&) {
  }
}

void use(Store& store) {
  const uint64_t capacity = store.header().capacity;
  uint32_t rows[4]{}, generations[4]{};
  uint8_t torn[4]{};
  double probability[4]{};
  const Draws out{rows, generations, probability};
  const Population population{store.priority_tree(), store.bit_tree(), store.words(), store.status().data()};
  DrawPlan plan;
  plan.key = {1, 2, 0};
  const uint32_t numbers[4] = {0, 1, 2, 3};
  const auto fetch_drawn = [&] {
    std::vector<std::byte> bytes(4 * store.fields()[0].block_bytes);
    const FetchField field{0, bytes.data()};
    FetchRequest request;
    request.rows = rows;
    request.generations = generations;
    request.fields = {&field, 1};
    request.torn = torn;
    if (bytes.size() < 1 << 20) fetch(store, request);
  };
  for (const By by : {By::priority, By::row}) {
    plan.by = by;
    attempt([&] {
      draw(population, plan, numbers, out);
      for (uint32_t& row : rows) row = row == kNoRow ? 0 : row;
      fetch_drawn();
    });
    attempt([&] { draw_distinct(population, plan, {}, {{rows, 2}, {generations, 2}, {probability, 2}}); });
  }
  attempt([&] {
    first_rows(population, Order::oldest, 0, {}, {}, out);
    fetch_drawn();
  });
  std::vector<uint32_t> all, of_all;
  attempt([&] { store.keys(&all, &of_all); });
  if (store.read_only()) return;
  attempt([&] { store.free_rows(); });
  attempt([&] { store.expire(); });
  uint8_t taken[4]{};
  const double priorities[2] = {0.5, 3};
  const size_t some = std::min<size_t>(2, all.size());
  attempt([&] { store.count_samples({all.data(), some}, {of_all.data(), some}, {taken, some}); });
  attempt([&] { store.release_exhausted({all.data(), some}, {of_all.data(), some}); });
  attempt([&] { store.update_priorities({all.data(), some}, {of_all.data(), some}, {priorities, some}); });
  attempt([&] { store.raise_priorities(0.5); });
  for (int i = 0; i < 3; ++i) {
    attempt([&] {
      store.allocate({rows, 3});
      store.commit({rows, 2}, {}, {generations, 2});
      store.publish({rows + 2, 1}, {}, {generations + 2, 1});
      store.extend(rows[2], store.header().max_length);
      store.remove({rows, 1}, {generations, 1});
    });
    attempt([&] { store.seal({rows + 2, 1}); });
  }
  attempt([&] { store.reap(); });
  // Whatever was in it, a rebuild makes a store of it.
  store.rebuild();
  if (!store.audit().empty() || store.counts().free > capacity) std::abort();
}

}  // namespace

std::vector<Input> fuzz_seeds() {
  std::vector<Input> seeds;
  for (uint8_t image = 0; image < 8; ++image) {
    for (const uint8_t what : {0, int{kAdopt}, int{kReadOnly}, kAdopt | kRefit, kAdopt | kMutex}) {
      for (uint8_t place = 0; place < std::size(kPlaces); ++place) {
        const uint8_t offset = static_cast<uint8_t>(7 * image + 3 * place);
        for (const bool open : {false, true}) {
          Input input = {image, what, static_cast<uint8_t>(!open), open, place, offset, 4};
          append(&input, open ? uint32_t{0xffff0000} : uint32_t{kRows});
          seeds.push_back(input);
        }
      }
    }
  }
  // Rows that are said to be written in place, by nobody: readers waited for each as long as for the lock.
  for (uint8_t row = 0; row < kRows; ++row) {
    Input input = {0, 0, 1, 0, 5, static_cast<uint8_t>(12 * row + 4), 4};
    append(&input, uint32_t{1});
    seeds.push_back(input);
  }
  return seeds;
}

}  // namespace geartrain

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace geartrain;
  Reader reader(data, size);
  Input image = images()[reader.take<uint8_t>() % images().size()];
  const auto what = reader.take<uint8_t>();
  const int before = reader.take<uint8_t>() % 8, after = reader.take<uint8_t>() % 8;
  for (int i = 0; i < before; ++i) patch(&reader, image.data(), image.size(), false);
  if ((what & kMutex) != 0) image[kControlOffset + 16] ^= 0x60;  // the kind
  if ((what & kShorter) != 0) image.resize(image.size() - 1 - reader.take<uint16_t>() % (image.size() - 1));
  if ((what & kLonger) != 0) image.resize(image.size() + reader.take<uint16_t>());
  if ((what & kRefit) != 0) refit(&image);

  static const std::string path = scratch("segment");
  static const int fd = [] {
    std::atexit([] { ::unlink(path.c_str()); });
    return ::open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  }();
  if (::ftruncate(fd, static_cast<off_t>(image.size())) != 0 ||
      ::pwrite(fd, image.data(), image.size(), 0) != static_cast<ssize_t>(image.size())) {
    std::abort();
  }
  AttachOptions options;
  options.adopt = (what & kAdopt) != 0;
  options.read_only = (what & kReadOnly) != 0;
  options.lock_timeout_s = 1;
  try {
    const auto store = Store::attach(path, options);
    for (int i = 0; i < after; ++i) {
      if (!store->read_only()) {
        patch(&reader, reinterpret_cast<uint8_t*>(store->mapping()->data()), store->mapping()->bytes(), true);
      }
      use(*store);
    }
    use(*store);
    store->close(true);
  } catch (const Error& error) {
    if (error.kind == ErrorKind::io || error.kind == ErrorKind::lock_timeout) throw;  // slow, or not understood
  }
  return 0;
}
