// Messages between the codec and the transports in Python: one received, and the payload of one to be sent.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <vector>

#include "transport/transport.h"

namespace geartrain {

namespace nb = nanobind;

// Exports an object's memory by the buffer protocol, to be released. Throws ArgumentError, with the exporter's reason,
// for what has no memory, is not C-contiguous, or is read-only and to be written.
void export_memory(nb::handle exporter, Py_buffer* view, bool writable);

// A received message, for as long as Python has it or an array over it.
struct Arrived {
  Message message;
};

// Payload of a message: a header, and the buffers of objects that stay unchanged meanwhile. Made and destroyed with the
// GIL held.
class Payload {
 public:
  Payload() = default;
  Payload(const Payload&) = delete;
  Payload& operator=(const Payload&) = delete;
  ~Payload() { clear(); }
  void clear() {
    for (Py_buffer& view : views_) PyBuffer_Release(&view);
    views_.clear();
    buffers_.clear();
    owners_.clear();
    header.clear();
  }

  std::vector<std::byte> header;

  // Memory that `owner` keeps alive.
  void add(const void* data, size_t bytes, nb::object owner) {
    buffers_.push_back({static_cast<const std::byte*>(data), bytes});
    owners_.push_back(std::move(owner));
  }
  // Anything with the buffer protocol, in C order. Throws ArgumentError.
  void add(nb::handle exporter) {
    Py_buffer view;
    export_memory(exporter, &view, false);
    views_.push_back(view);
    buffers_.push_back({static_cast<const std::byte*>(view.buf), static_cast<size_t>(view.len)});
  }
  const std::vector<Bytes>& buffers() const { return buffers_; }
  size_t bytes() const {
    size_t bytes = header.size();
    for (const Bytes& part : buffers_) bytes += part.size();
    return bytes;
  }

 private:
  std::vector<Bytes> buffers_;
  std::vector<Py_buffer> views_;
  std::vector<nb::object> owners_;
};

void bind_codec(nb::module_& module);
void bind_transport(nb::module_& module);
void bind_collectives(nb::module_& module);

}  // namespace geartrain
