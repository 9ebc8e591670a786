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
#include "fetch/packed.h"
#include "selection/selection.h"
#include "store/store.h"
#include "tests/support/fuzz.h"
#include "tests/support/task_rows.h"

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

// Stores with tasks, whose rows are in all states: just inserted, claimed and written by this process, appended to,
// answered, finished, and gone while a span of it is filled.
void add_task_images(std::vector<Input>* images) {
  const std::string path = scratch("seed");
  StoreOptions options = options_of_tests(kRows, 8 << 10);
  options.persist = true;
  auto store = Store::create(path, fields_of_tests(), options);
  Tasks& tasks = *store->tasks();
  insert(*store, 7);
  auto claimed = tasks.claim(kAnswer, {.most = 7});
  for (const size_t i : {0u, 1u, 2u}) put(*store, kAnswer, claimed[i], kLengths, 1);
  for (const uint32_t task : {kReward, kRef}) put(*store, task, tasks.claim(task, {})[0], kLengths, 2);
  for (const size_t i : {3u, 3u, 4u}) put(*store, kAnswer, claimed[i], {0, 6}, 3, Write::append, 2, 1);
  tasks.release(kAnswer, std::span(claimed).subspan(4, 2));
  TaskRow begun = row_of(*store, kAnswer, claimed[3], kLengths), gone = row_of(*store, kAnswer, claimed[6], kLengths);
  tasks.begin(Write::put, kAnswer, {&begun, 1});
  tasks.begin(Write::put, kAnswer, {&gone, 1});
  store->remove({&gone.row, 1}, {&gone.generation, 1});
  tasks.make_room(kReward, row_of(*store, kReward, tasks.claim(kReward, {})[0], kLengths));
  images->push_back(contents(path));
  store->close();
  images->push_back(contents(path));
  ::unlink(path.c_str());
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
  add_task_images(&images);
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
  RegionId region = kRegionCount;  // that the offset is from; none: the segment
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
    // Of a store with tasks.
    {0, 8, kTasksRegion},                             // axes and tasks
    {offsetof(TaskTable, figures), 4, kTasksRegion},  // the first tasks' figures
    {offsetof(TaskTable, finished), 4, kTasksRegion},
    {offsetof(TaskTable, waiters), 4, kTasksRegion},
    {offsetof(TaskTable, index), 8, kTasksRegion},
    {0, 8, kTaskWordsRegion},
    {5, 8, kTaskWordsRegion},  // their states
    {0, 4, kDueRegion},
    {0, 8, kSpansRegion},  // heads
    {0, 4, kSpansRegion},
};
constexpr uint8_t kPlacesOfAll = 12;
enum What : uint8_t { kAdopt = 1, kReadOnly = 2, kRefit = 4, kShorter = 8, kLonger = 16, kMutex = 32 };

const Header& task_regions() {
  static const Header header = [] {
    Header read;
    std::memcpy(&read, images().back().data(), sizeof read);
    return read;
  }();
  return header;
}

void patch(Reader* from, uint8_t* bytes, uint64_t size, bool open) {
  const Place place = kPlaces[from->take<uint8_t>() % std::size(kPlaces)];
  uint64_t at = place.offset + from->take<uint8_t>() * place.stride;
  if (place.region != kRegionCount) at += task_regions().regions[place.region].offset;
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
  const auto* fields = reinterpret_cast<const FieldRecord*>(image->data() + kFieldsOffset);
  const uint64_t at = header.regions[kTasksRegion].offset;
  const bool tasks = (header.required_features & kRowSpans) != 0 && at % 4096 == 0 && at < image->size() &&
                     image->size() - at >= sizeof(TaskTable);
  header.fingerprint =
      layout_fingerprint(header, fields, tasks ? reinterpret_cast<const TaskTable*>(image->data() + at) : nullptr);
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

// Spans that a call has begun, written to as callers do; what they hold may be anybody's in a damaged segment.
void fill(const Store& store, std::span<const TaskRow> rows) {
  for (const TaskRow& each : rows) {
    if (each.span == 0) continue;
    auto* const head = reinterpret_cast<std::byte*>(store.tasks()->heap().head(each.span));
    std::memset(head + sizeof(SpanHead), 7, (each.units - 1) * kSpanUnit);
  }
}

void read_packed(Store& store, std::span<const uint32_t> rows, std::span<const uint32_t> generations) {
  std::vector<uint32_t> fields(store.header().field_count);
  for (uint32_t i = 0; i < fields.size(); ++i) fields[i] = i;
  const PackedPlan plan(store, fields);
  std::vector<std::byte> bytes;
  const auto room = [&](size_t size) {
    if (size > 1 << 20) fail(ErrorKind::no_space, "a batch of ", size, " bytes");
    bytes.resize(size + 64);
    return bytes.data() + 64 - reinterpret_cast<uintptr_t>(bytes.data()) % 64;
  };
  PackedRows(plan, rows, generations).read(room, 1);
}

void use_tasks(Store& store) {
  Tasks& tasks = *store.tasks();
  const auto capacity = static_cast<uint32_t>(std::min<uint64_t>(store.header().capacity, 16));
  std::vector<uint32_t> rows, generations;
  for (uint32_t row = 0; row < capacity; ++row) {
    rows.push_back(row);
    generations.push_back(generation_of(store.words()[row].load()) | 1);
    AxisLengths lengths;
    tasks.lengths(row, generations[row], &lengths);
    for (uint32_t task = 0; task <= tasks.count(); ++task) tasks.filled(tasks.word(row, task));
    attempt([&] { read_packed(store, {&rows[row], 1}, {&generations[row], 1}); });
  }
  attempt([&] { read_packed(store, rows, generations); });
  attempt([&] { tasks.occupancy(); });
  if (store.read_only()) return;
  const auto write = [&](Write write, uint32_t task, const ClaimedRow& row, AxisLengths lengths, uint8_t axis) {
    attempt([&] {
      TaskRow each = row_of(store, task, row, lengths, axis);
      try {
        if (tasks.begin(write, task, {&each, 1}, axis) == 1) {
          fill(store, {&each, 1});
          tasks.finish(write, task, {&each, 1});
        } else {
          tasks.make_room(task, each);
        }
      } catch (const Error&) {
        attempt([&] { tasks.abandon(task, {&each, 1}); });
        throw;
      }
    });
  };
  attempt([&] {
    std::vector<TaskRow> fresh(2, row_of(store, 0, {kNoRow, 0, 0}, {4}));
    std::vector<uint32_t> keys(2);
    if (!tasks.begin_insert(fresh)) return;
    fill(store, fresh);
    tasks.finish_insert(fresh, {}, keys);
  });
  for (uint32_t task = 1; task < tasks.count(); ++task) {
    attempt([&] { tasks.is_over(task); });
    attempt([&] { tasks.oldest_claim(task); });
    for (uint32_t row = 0; row < capacity; ++row) {
      AxisLengths lengths;
      if (!tasks.lengths(row, generations[row], &lengths)) continue;
      write(Write::rewrite, task, {row, generations[row], 0}, lengths, 0);
    }
    std::vector<ClaimedRow> claimed;
    attempt([&] { claimed = tasks.claim(task, {.most = 4, .max_items = 100, .axis = 1}); });
    for (size_t i = 0; i < claimed.size(); ++i) {
      if (task == kAnswer) write(Write::append, task, claimed[i], {0, 9}, 2);
      attempt([&] { tasks.chain(task, claimed[i]); });
      AxisLengths lengths;
      if (i == 3 || !tasks.lengths(claimed[i].row, claimed[i].generation, &lengths)) continue;
      if (task == kAnswer) lengths[1] = 20, lengths[2] = 3;
      write(Write::put, task, claimed[i], lengths, 0);
      if (i == 1) attempt([&] { tasks.drop(task, {&claimed[i], 1}); });
    }
    attempt([&] { tasks.release(task, claimed); });
  }
  attempt([&] { tasks.stop_waiting(); });
  attempt([&] { store.remove({rows.data(), 1}, {generations.data(), 1}); });
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
  if (store.tasks() != nullptr) use_tasks(store);
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
  bool fine = store.counts().free <= capacity;
  for (const std::string& problem : store.audit()) {
    std::fprintf(stderr, "%s\n", problem.c_str());
    fine = false;
  }
  if (!fine) std::abort();
}

}  // namespace

std::vector<Input> fuzz_seeds() {
  std::vector<Input> seeds;
  for (uint8_t image = 0; image < 8; ++image) {
    for (const uint8_t what : {0, int{kAdopt}, int{kReadOnly}, kAdopt | kRefit, kAdopt | kMutex}) {
      for (uint8_t place = 0; place < kPlacesOfAll; ++place) {
        const uint8_t offset = static_cast<uint8_t>(7 * image + 3 * place);
        for (const bool open : {false, true}) {
          Input input = {image, what, static_cast<uint8_t>(!open), open, place, offset, 4};
          append(&input, open ? uint32_t{0xffff0000} : uint32_t{kRows});
          seeds.push_back(input);
        }
      }
    }
  }
  // All that tells of tasks: words, heads, figures.
  for (uint8_t image = 8; image < 10; ++image) {
    for (uint8_t place = kPlacesOfAll; place < std::size(kPlaces); ++place) {
      for (uint8_t offset = 0; offset < 60; ++offset) {
        const bool open = offset % 2 == 0;
        const uint8_t what = offset % 3 == 0 ? kAdopt | kRefit : offset % 3 == 1 ? kAdopt : 0;
        Input input = {image, what, static_cast<uint8_t>(!open), open, place, offset, 4};
        append(&input, offset % 5 == 0 ? uint32_t{0xffffffff} : uint32_t{offset} % 17);
        seeds.push_back(input);
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
