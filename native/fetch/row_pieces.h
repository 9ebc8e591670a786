// Row pieces: where the windows of chosen rows lie in the segment and where in a batch they go, for copies that
// somebody else makes: the copy engines of a device.
//
//   const PieceCounts found = locate_pieces(store, request);     // reads words and status; touches no block
//   ...                                                          // the copies, begun after that and complete
//   find_changed(store, rows, generations, contents, torn);      // whose rows were not one state of them
//
// It is fetch.h's copy in two halves with row_copy.h's check around them, and a row is whole by the same argument:
// locate_pieces reads the word with acquire order before any byte of the row is read, and find_changed reads it behind
// a fence once every byte was. What has to hold of the copies in between: they read memory as this process sees it
// when they are begun or later, and they are complete when find_changed is called.
#pragma once

#include <cstdint>
#include <span>

#include "fetch/request.h"
#include "store/store.h"

namespace geartrain {

struct PieceRequest {
  FetchRequest rows;                  // `out` of its fields is not used; all of its metadata is filled
  std::span<const uint64_t> offsets;  // of each field in the batch
  std::span<uint64_t> contents;       // for find_changed, one a row
  // Filled: offsets in the batch and in the segment, and bytes. Room for rows x fields.
  std::span<uint64_t> to, from, bytes;
  // Filled: where the batch has no step, which has to be 0. Room for two a row and field.
  std::span<uint64_t> gap_at, gap_bytes;
};

struct PieceCounts {
  uint64_t pieces = 0, gaps = 0, torn = 0;
};

// Rows whose keys are stale are torn and have no pieces. Throws schema when rows or fields are out of range.
PieceCounts locate_pieces(const Store& store, const PieceRequest& request);

// Sets torn[i] to 1 where a row is not its key's any more or was written in place; the others stay as they are.
// Returns how many it has found.
uint64_t find_changed(const Store& store, std::span<const uint32_t> rows, std::span<const uint32_t> generations,
                      std::span<const uint64_t> contents, std::span<uint8_t> torn);

}  // namespace geartrain
