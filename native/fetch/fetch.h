// Fetch: gathering chosen rows of a store into one batch, and scattering a batch into rows.
//
// No locks and no intermediate copies: bytes go from the columns straight into the caller's buffers, on several
// threads. Each row's word is read before and after its copy; a row that changed meanwhile is reported as torn and
// its bytes are invalid. Nothing else can fail once the arguments are checked.
//
// What is asked for, windows and all, is request.h's.
#pragma once

#include <cstdint>
#include <span>

#include "fetch/request.h"
#include "store/store.h"

namespace geartrain {

// Returns the number of torn rows. Throws schema when rows or fields are out of range.
uint64_t fetch(const Store& store, const FetchRequest& request);

// Bytes that the request moves into its outputs.
uint64_t batch_bytes(const Store& store, const FetchRequest& request);

// Bytes of one row of a field in a batch of such windows (0: whole rows), all of them or those of some steps.
uint64_t fetched_row_bytes(const Store& store, uint32_t field, uint32_t window, const FieldSteps* steps);

// One field of rows to be written.
using InsertField = FieldSource;

// Copies into blocks this process has allocated. `lengths` in steps, empty: whole blocks. `threads` 0: the default.
void fill(const Store& store, std::span<const uint32_t> rows, std::span<const InsertField> fields,
          std::span<const uint32_t> lengths, unsigned threads);

}  // namespace geartrain
