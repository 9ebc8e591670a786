// Binding of fetch: batches in warm, recycled memory, or in the caller's own.

#include "fetch/fetch.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <span>
#include <vector>

#include "base/buffer_pool.h"
#include "base/errors.h"
#include "fetch/row_pieces.h"
#include "python/batch_layout.h"
#include "python/bind.h"
#include "python/window_plan.h"

namespace geartrain {
namespace {

// Uninitialised pooled arrays for the fields of a batch.
nb::list empty_batch(const Store& store, size_t n, const std::vector<uint32_t>& fields, uint32_t window,
                     const std::optional<WindowTuple>& windows) {
  store.check_open();
  const WindowPlan plan = window_plan(window, windows);
  std::vector<std::vector<size_t>> shapes;
  size_t bytes = 0;
  for (size_t i = 0; i < fields.size(); ++i) {
    store.check_column(fields[i]);
    shapes.push_back(batch_shape(store.fields()[fields[i]], n, window, plan.steps_of(i)));
    bytes += PooledMemory::padded(bytes_of(shapes.back(), store.fields()[fields[i]].itemsize));
  }
  PooledMemory memory(bytes);
  nb::list arrays;
  for (size_t i = 0; i < fields.size(); ++i) {
    const FieldRecord& record = store.fields()[fields[i]];
    arrays.append(memory.array(memory.take(bytes_of(shapes[i], record.itemsize)), shapes[i],
                               array_dtype(record.dtype, record.itemsize)));
  }
  return arrays;
}

// What is told of rows beside their values, in pooled memory.
size_t told_bytes(size_t n, size_t steps) {
  return 2 * PooledMemory::padded(n * 4) + PooledMemory::padded(n * 8) + PooledMemory::padded(n) +
         PooledMemory::padded(n * steps);
}
void tell_in(PooledMemory& memory, size_t n, size_t steps, FetchRequest* request) {
  request->versions = memory.take_items<int64_t>(n);
  request->starts = memory.take_items<int32_t>(n);
  request->lengths = memory.take_items<int32_t>(n);
  request->torn = memory.take_items<uint8_t>(n);
  request->mask = memory.take_items<uint8_t>(n * steps);
}
// (torn, mask, starts, lengths, versions)
nb::tuple told_of(const PooledMemory& memory, size_t n, size_t steps, const FetchRequest& request) {
  auto* const mask = reinterpret_cast<std::byte*>(request.mask.data());
  return nb::make_tuple(memory.array(request.torn, {n}), memory.array(mask, {n, steps}, nb::dtype<bool>()),
                        memory.array(request.starts, {n}), memory.array(request.lengths, {n}),
                        memory.array(request.versions, {n}));
}

// Threads fill them at once, so that no two of the caller's arrays may share memory.
void check_apart(const Store& store, const std::vector<FetchField>& targets, const std::vector<AnyArray>& out) {
  struct Extent {
    const std::byte *begin, *end;
    uint32_t field;
  };
  std::vector<Extent> extents;
  for (size_t i = 0; i < targets.size(); ++i) {
    extents.push_back({targets[i].out, targets[i].out + out[i].nbytes(), targets[i].field});
  }
  std::ranges::sort(extents, {}, &Extent::begin);
  for (size_t i = 1; i < extents.size(); ++i) {
    if (extents[i].begin < extents[i - 1].end) {
      fail(ErrorKind::schema, "the output arrays of fields '", store.fields()[extents[i - 1].field].name, "' and '",
           store.fields()[extents[i].field].name, "' share memory");
    }
  }
}

// Returns (arrays of the fields, torn, mask, starts, lengths, versions, number torn).
nb::object fetch_rows(const Store& store, const In<uint32_t>& rows, const In<uint32_t>& generations,
                      const std::vector<uint32_t>& fields, uint32_t window, bool pad_left,
                      const std::optional<In<int32_t>>& ends, unsigned threads,
                      const std::optional<std::vector<AnyArray>>& out, const std::optional<In<uint32_t>>& places,
                      bool within_episodes, const std::optional<WindowTuple>& windows) {
  store.check_open();
  const WindowPlan plan = window_plan(window, windows);
  const size_t n = rows.size();
  // Rows that the outputs have room for: those requested, or as many as `places` reaches.
  size_t room = n;
  if (places) {
    if (!out) fail(ErrorKind::schema, "places need output arrays");
    for (uint32_t place : view(*places)) room = std::max<size_t>(room, size_t{place} + 1);
  }
  const size_t steps = window != 0 ? window : store.header().max_length;
  std::vector<std::vector<size_t>> shapes;
  size_t bytes = 0;
  for (size_t i = 0; i < fields.size(); ++i) {
    store.check_column(fields[i]);
    const FieldRecord& record = store.fields()[fields[i]];
    shapes.push_back(batch_shape(record, n, window, plan.steps_of(i)));
    if (!out) bytes += PooledMemory::padded(bytes_of(shapes.back(), record.itemsize));
  }
  if (out && out->size() != fields.size()) {
    fail(ErrorKind::schema, fields.size(), " fields were asked for with ", out->size(), " output arrays");
  }
  bytes += PooledMemory::padded(n * 4) + told_bytes(n, steps);

  PooledMemory memory(bytes);
  std::vector<FetchField> targets;
  nb::list arrays;
  for (size_t i = 0; i < fields.size(); ++i) {
    const FieldRecord& record = store.fields()[fields[i]];
    const size_t size = bytes_of(shapes[i], record.itemsize);
    if (out) {
      const AnyArray& given = (*out)[i];
      const size_t needed =
          places ? bytes_of(batch_shape(record, room, window, plan.steps_of(i)), record.itemsize) : size;
      if ((places ? given.nbytes() < needed : given.nbytes() != needed) || given.itemsize() != record.itemsize) {
        fail(ErrorKind::schema, "the output array of field '", record.name, "' has ", given.nbytes(),
             " bytes, the batch needs ", needed);
      }
      targets.push_back({fields[i], static_cast<std::byte*>(given.data()), plan.steps_of(i)});
    } else {
      std::byte* at = memory.take(size);
      targets.push_back({fields[i], at, plan.steps_of(i)});
      arrays.append(memory.array(at, shapes[i], array_dtype(record.dtype, record.itemsize)));
    }
  }
  if (out) check_apart(store, targets, *out);
  // Bounded and then used as places: another thread may write to the caller's array in between.
  const std::span<uint32_t> own_rows = memory.take_items<uint32_t>(n);
  std::copy_n(rows.data(), n, own_rows.begin());
  FetchRequest request;
  request.rows = own_rows;
  request.generations = view(generations);
  request.fields = targets;
  request.windows_of(plan, pad_left);
  request.ends = view(ends);
  request.within_episodes = within_episodes;
  if (places) request.places = view(*places);
  request.threads = threads;
  tell_in(memory, n, steps, &request);
  const uint64_t torn = released(store, [&] { return fetch(store, request); });
  return nb::make_tuple(arrays) + told_of(memory, n, steps, request) + nb::make_tuple(torn);
}

// Returns (to, from, bytes), (gap at, gap bytes), contents, torn, mask, starts, lengths, versions.
nb::object row_pieces(const Store& store, const In<uint32_t>& rows, const In<uint32_t>& generations,
                      const std::vector<uint32_t>& fields, const In<uint64_t>& offsets, uint32_t window, bool pad_left,
                      const std::optional<In<int32_t>>& ends, const std::optional<In<uint32_t>>& places) {
  store.check_open();
  const size_t n = rows.size(), pieces = n * fields.size();
  const size_t steps = window != 0 ? window : store.header().max_length;
  const auto words = [](size_t count) { return PooledMemory::padded(count * sizeof(uint64_t)); };
  PooledMemory memory(3 * words(pieces) + 2 * words(2 * pieces) + words(n) + told_bytes(n, steps));
  const std::vector<uint32_t> own_rows = copied(rows);
  PieceRequest request;
  request.to = memory.take_items<uint64_t>(pieces);
  request.from = memory.take_items<uint64_t>(pieces);
  request.bytes = memory.take_items<uint64_t>(pieces);
  request.gap_at = memory.take_items<uint64_t>(2 * pieces);
  request.gap_bytes = memory.take_items<uint64_t>(2 * pieces);
  request.contents = memory.take_items<uint64_t>(n);
  request.offsets = view(offsets);
  std::vector<FetchField> wanted;
  for (uint32_t field : fields) wanted.push_back({field, nullptr});
  FetchRequest& asked = request.rows;
  asked.rows = own_rows;
  asked.generations = view(generations);
  asked.fields = wanted;
  asked.window = window;
  asked.pad_left = pad_left;
  asked.ends = view(ends);
  if (places) asked.places = view(*places);
  tell_in(memory, n, steps, &asked);
  const PieceCounts found = released(store, [&] { return locate_pieces(store, request); });
  const auto array = [&](std::span<uint64_t> values, size_t count) {
    return memory.array(values.first(count), {count});
  };
  return nb::make_tuple(nb::make_tuple(array(request.to, found.pieces), array(request.from, found.pieces),
                                       array(request.bytes, found.pieces)),
                        nb::make_tuple(array(request.gap_at, found.gaps), array(request.gap_bytes, found.gaps)),
                        array(request.contents, n)) +
         told_of(memory, n, steps, asked);
}

// Sets 1 in `torn` where rows have changed since their pieces were located; returns how many these are.
uint64_t changed_rows(const Store& store, const In<uint32_t>& rows, const In<uint32_t>& generations,
                      const In<uint64_t>& contents, const AnyArray& torn) {
  store.check_open();
  if (torn.itemsize() != 1) fail(ErrorKind::schema, "torn rows are told by bytes");
  const std::span<uint8_t> to(static_cast<uint8_t*>(torn.data()), torn.nbytes());
  const std::vector<uint32_t> own_rows = copied(rows);
  return released(store, [&] { return find_changed(store, own_rows, view(generations), view(contents), to); });
}

// Recycled bytes, for messages.
nb::object pooled_bytes(size_t bytes) {
  PooledMemory memory(PooledMemory::padded(bytes));
  return memory.array(memory.take_items<uint8_t>(bytes), {bytes});
}

nb::dict pool_dict() {
  const PoolCounts counts = pool_counts();
  nb::dict out;
  out["buffers_made"] = counts.buffers_made;
  out["buffers_reused"] = counts.buffers_reused;
  out["bytes_in_use"] = counts.bytes_in_use;
  out["bytes_kept"] = counts.bytes_kept;
  return out;
}

}  // namespace

void bind_fetch(nb::module_& module) {
  module.def("fetch", &fetch_rows, nb::arg("store"), nb::arg("rows"), nb::arg("generations"), nb::arg("fields"),
             nb::arg("window"), nb::arg("pad_left"), nb::arg("ends").none(), nb::arg("threads"), nb::arg("out").none(),
             nb::arg("places").none() = nb::none(), nb::arg("within_episodes") = false,
             nb::arg("windows").none() = nb::none());
  module.def("row_pieces", &row_pieces, nb::arg("store"), nb::arg("rows"), nb::arg("generations"), nb::arg("fields"),
             nb::arg("offsets"), nb::arg("window"), nb::arg("pad_left"), nb::arg("ends").none(),
             nb::arg("places").none());
  module.def("changed_rows", &changed_rows);
  module.def("empty_batch", &empty_batch, nb::arg("store"), nb::arg("n"), nb::arg("fields"), nb::arg("window"),
             nb::arg("windows").none() = nb::none());
  module.def("pooled_bytes", &pooled_bytes);
  module.def("pool_counts", &pool_dict);
}

}  // namespace geartrain
