// Bindings of connections, listeners, the inbox and calls. Every wait releases the GIL, and checks
// for signals now and then; a send does not, since half a message cannot be undone, and neither do reads and writes of
// exposed memory.

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "base/clock.h"
#include "base/errors.h"
#include "python/bind.h"
#include "python/codec.h"
#include "python/messages.h"
#include "transport/providers/lane_threads.h"
#include "transport/rpc/inbox.h"
#include "transport/rpc/pending_calls.h"
#include "transport/security/openssl.h"
#include "transport/security/tls.h"
#include "transport/sideband/memory_region.h"
#include "transport/transport.h"

namespace geartrain {
namespace {

// The same for waits that throw timed_out.
template <typename Wait>
void patiently_or_throw(Deadline deadline, Wait&& wait) {
  const bool ended = patiently(deadline, [&](Deadline slice, Deadline) {
    try {
      wait(slice);
      return true;
    } catch (const Error& error) {
      if (error.kind != ErrorKind::timed_out || deadline.passed()) throw;
      return false;
    }
  });
  if (ended) return;
  const Unlocked unlocked;  // the deadline passed while the GIL was waited for: a last look
  wait(Deadline::after(0));
}

Options options_from(const nb::dict& given) {
  Options options;
  options.secret = secret_of(given);
  options.transport = item<std::string>(given, "transport", "");
  if (given.contains("tls_certificate")) {
    TlsFiles files;
    files.certificate = item<std::string>(given, "tls_certificate", "");
    files.key = item<std::string>(given, "tls_key", "");
    files.ca = item<std::string>(given, "tls_ca", "");
    files.name = item<std::string>(given, "tls_name", "");
    files.threads = item(given, "tls_threads", files.threads);
    options.tls = TlsContext::load(files);
  }
  options.spin_us = item(given, "spin_us", options.spin_us);
  options.views = item(given, "views", options.views);
  options.lanes = item(given, "lanes", options.lanes);
  options.peer_timeout_s = item(given, "peer_timeout_s", options.peer_timeout_s);
  options.cross_memory = item(given, "cross_memory", options.cross_memory);
  MessageLimits& limits = options.limits;
  limits.max_header_bytes = item(given, "max_header_bytes", limits.max_header_bytes);
  limits.max_message_bytes = item(given, "max_message_bytes", limits.max_message_bytes);
  limits.max_buffers = item(given, "max_buffers", limits.max_buffers);
  limits.max_queued_bytes = item(given, "max_queued_bytes", limits.max_queued_bytes);
  limits.max_segment_bytes = item(given, "max_segment_bytes", limits.max_segment_bytes);
  limits.max_pending = item(given, "max_pending", limits.max_pending);
  limits.handshake_timeout_s = item(given, "handshake_timeout_s", limits.handshake_timeout_s);
  return options;
}

std::unique_ptr<Listener> listen(const nb::dict& options, const std::string& host, uint16_t port,
                                 const std::vector<std::string>& advertise, bool shm) {
  ListenerOptions listening;
  listening.options = options_from(options);
  listening.tcp_host = host;
  listening.tcp_port = port;
  listening.advertise = advertise;
  listening.shm = shm;
  return std::make_unique<Listener>(listening);
}

std::shared_ptr<Connection> connect_to(const std::string& address, const nb::dict& given, double timeout_s) {
  const Options options = options_from(given);
  return interruptibly([&] { return connect(address, options, Deadline::after(timeout_s)); });
}

void send(Connection& connection, uint64_t tag, uint32_t kind, const Payload& payload, double timeout_s) {
  const Unlocked unlocked;
  connection.send({tag, kind, payload.header, payload.buffers()}, Deadline::after(timeout_s));
}

Arrived* receive(Connection& connection, double timeout_s) {
  auto arrived = std::make_unique<Arrived>();
  patiently_or_throw(Deadline::after(timeout_s), [&](Deadline slice) { connection.receive(&arrived->message, slice); });
  return arrived.release();
}

// An object's memory, pinned by its buffer export. Throws ArgumentError.
class Held {
 public:
  Held(nb::handle exporter, bool writable) { export_memory(exporter, &view_, writable); }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  ~Held() { PyBuffer_Release(&view_); }
  std::span<std::byte> bytes() const { return {static_cast<std::byte*>(view_.buf), static_cast<size_t>(view_.len)}; }

 private:
  Py_buffer view_;
};

// Memory that a peer may use until this is closed, or destroyed.
class Exposed {
 public:
  Exposed(Connection& connection, nb::handle array, bool writable)
      : held_(std::make_unique<Held>(array, writable)), region_(connection.expose(held_->bytes(), writable)) {}
  ~Exposed() { close(); }

  nb::bytes handle() const {
    const RegionHandle handle = region_->handle();
    return nb::bytes(&handle, sizeof handle);
  }
  void close() {
    without_gil([&] { region_->close(); });
    held_.reset();
  }
  bool closed() const { return region_->closed(); }
  uint64_t bytes() const { return region_->bytes(); }

 private:
  std::unique_ptr<Held> held_;
  std::shared_ptr<ExposedRegion> region_;
};

Bytes bytes_of(const nb::bytes& given) {
  return std::as_bytes(std::span(given.c_str(), given.size()));
}

void read_region(Connection& connection, const nb::bytes& handle, nb::handle into, uint64_t offset, double timeout_s) {
  const Held held(into, true);
  const Unlocked unlocked;
  connection.read(bytes_of(handle), held.bytes(), offset, Deadline::after(timeout_s));
}

void write_region(Connection& connection, const nb::bytes& handle, nb::handle from, uint64_t offset, double timeout_s) {
  const Held held(from, false);
  const Unlocked unlocked;
  connection.write(bytes_of(handle), held.bytes(), offset, Deadline::after(timeout_s));
}

nb::dict counts(const Connection& connection) {
  const ConnectionCounts found = connection.counts();
  nb::dict out, sent, received;
  for (size_t i = 0; i < kPathCount; ++i) {
    if (found.bytes_sent[i] != 0) sent[kPathNames[i]] = found.bytes_sent[i];
    if (found.bytes_received[i] != 0) received[kPathNames[i]] = found.bytes_received[i];
  }
  out["messages_sent"] = found.messages_sent;
  out["messages_received"] = found.messages_received;
  out["bytes_sent"] = sent;
  out["bytes_received"] = received;
  return out;
}

// For threads of a server's alone, which are never Python's main one: no signals are checked, for which threads of
// every idle node would wake up four times a second. None at the deadline; else (id, how many other threads wait, kind,
// tag, bytes, value, error). The kind is -1 where the connection was lost, and the value the reason. The error is what
// decoding the message has raised, or None.
nb::object next_event(Inbox& inbox, const Codec& codec, double timeout_s) {
  Inbox::Event event;
  {
    const Unlocked unlocked;
    if (!inbox.receive(&event, Deadline::after(timeout_s))) return nb::none();
  }
  if (event.lost) return nb::make_tuple(event.id, event.standing_by, -1, 0, 0, event.reason, nb::none());
  const uint32_t kind = event.message.kind;
  const uint64_t tag = event.message.tag, bytes = event.message.bytes();
  const Codec::Decoded found = codec.decode_message(event.message, event.trusted);
  return nb::make_tuple(event.id, event.standing_by, kind, tag, bytes, found.value, found.error);
}

// The calls over one connection, whose answers are decoded as they come.
class PythonPendingCalls : public PendingCalls {
 public:
  PythonPendingCalls(std::shared_ptr<Connection> connection, size_t max_open, nb::object codec, bool pickle)
      : PendingCalls(std::move(connection), max_open),
        codec(nb::cast<const Codec&>(codec)),
        pickle(pickle),
        held_(std::move(codec)) {}
  const Codec& codec;
  const bool pickle;

 private:
  const nb::object held_;
};

constexpr int kUndecodable = -1;  // in place of an answer's kind: its value is what decoding has raised

// (kind, value, tag, arrived) of an answer; `arrived` is time.perf_counter() before it was decoded.
nb::object decoded(const PythonPendingCalls& calls, const Message& answer) {
  const double arrived_s = static_cast<double>(monotonic_ns()) / 1e9;
  const Codec::Decoded found = calls.codec.decode_message(answer, calls.pickle);
  if (!found.error.is_none()) return nb::make_tuple(kUndecodable, found.error, answer.tag, arrived_s);
  return nb::make_tuple(answer.kind, found.value, answer.tag, arrived_s);
}

// Sends a request, a value or the payload of one that was encoded before, until `until_s` in time.monotonic(): its tag.
uint64_t start(PythonPendingCalls& calls, uint32_t kind, nb::handle value, nb::handle tensors, double until_s) {
  Payload encoded;
  const bool before = nb::isinstance<Payload>(value);
  if (!before) kind = calls.codec.encode_message(kind, value, calls.pickle, tensors, 0, until_s, &encoded);
  const Payload& payload = before ? nb::cast<const Payload&>(value) : encoded;
  const Unlocked unlocked;
  return calls.start(kind, payload.header, payload.buffers(), Deadline::at(until_s));
}

// The answer; `until_s` is in time.monotonic().
nb::object wait_for_answer(PythonPendingCalls& calls, uint64_t tag, double until_s) {
  Message answer;
  patiently_or_throw(Deadline::at(until_s), [&](Deadline slice) { calls.wait(tag, &answer, slice); });
  return decoded(calls, answer);
}

nb::object next_detached(PythonPendingCalls& calls, double timeout_s) {
  Message answer;
  patiently_or_throw(Deadline::after(timeout_s), [&](Deadline slice) { calls.next_detached(&answer, slice); });
  return decoded(calls, answer);
}

}  // namespace

void export_memory(nb::handle exporter, Py_buffer* view, bool writable) {
  if (PyObject_GetBuffer(exporter.ptr(), view, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) == 0) return;
  const nb::python_error reason;
  if (!reason.matches(PyExc_TypeError) && !reason.matches(PyExc_ValueError) && !reason.matches(PyExc_BufferError)) {
    throw reason;
  }
  const nb::object refusal = nb::module_::import_("geartrain.errors").attr("ArgumentError");
  const nb::str said = nb::str("memory is anything {}C-contiguous with the buffer protocol, found a {}: {}")
                           .format(writable ? "writable and " : "", exporter.type().attr("__name__"), reason.value());
  PyErr_SetObject(refusal.ptr(), said.ptr());
  throw nb::python_error();
}

void bind_transport(nb::module_& module) {
  nb::class_<Connection>(module, "Connection")
      .def("send", &send)
      .def("receive", &receive)
      .def("close", &Connection::close, nb::call_guard<Unlocked>())
      .def("expose", [](Connection& connection, nb::handle array,
                        bool writable) { return std::make_unique<Exposed>(connection, array, writable); })
      .def("read", &read_region)
      .def("write", &write_region)
      .def_prop_ro("one_sided", &Connection::one_sided)
      .def("counts", &counts)
      .def("describe", &Connection::describe)
      .def_prop_ro("transport", &Connection::transport)
      .def_prop_ro("name", &Connection::name)
      .def_prop_ro("authenticated", &Connection::authenticated)
      .def_prop_ro("tls", &Connection::tls)
      .def_prop_ro("considered", &Connection::considered)
      .def_prop_ro("lost", &Connection::lost)
      .def(
          "found_lost", [](Connection& connection) { return connection.look_for_end().lost; },
          nb::call_guard<Unlocked>())
      .def_prop_ro("closed", &Connection::closed);

  nb::class_<Exposed>(module, "Region")
      .def_prop_ro("handle", &Exposed::handle)
      .def_prop_ro("nbytes", &Exposed::bytes)
      .def_prop_ro("closed", &Exposed::closed)
      .def("close", &Exposed::close);

  nb::class_<Listener>(module, "Listener")
      .def_static("make", &listen)
      .def("accept",
           [](Listener& listener, double timeout_s) {
             std::shared_ptr<Connection> connection;
             patiently_or_throw(Deadline::after(timeout_s),
                                [&](Deadline slice) { connection = listener.accept(slice); });
             return connection;
           })
      // As Inbox.receive: of a server's thread.
      .def(
          "accept_in_thread",
          [](Listener& listener, double timeout_s) { return listener.accept(Deadline::after(timeout_s)); },
          nb::call_guard<Unlocked>())
      .def_prop_ro("address", &Listener::address)
      .def_prop_ro("refused", &Listener::refused)
      .def_prop_ro("refusal", &Listener::refusal)
      .def("close", &Listener::close, nb::call_guard<Unlocked>());

  nb::class_<Inbox>(module, "Inbox")
      .def(nb::init<double, uint32_t>())
      .def("yield_slot", &Inbox::yield_slot)
      .def("add", &Inbox::add, nb::arg("id"), nb::arg("connection"), nb::arg("trusted") = false,
           nb::call_guard<Unlocked>())
      .def("watch", &Inbox::watch, nb::call_guard<Unlocked>())
      .def("remove", &Inbox::remove, nb::call_guard<Unlocked>())
      .def("resume", &Inbox::resume)
      .def("receive", &next_event)
      .def("close", &Inbox::close, nb::call_guard<Unlocked>());

  nb::class_<PythonPendingCalls>(module, "PendingCalls")
      .def(nb::init<std::shared_ptr<Connection>, size_t, nb::object, bool>())
      .def("start", &start)
      .def("wait", &wait_for_answer)
      .def("detach", &PendingCalls::detach)
      .def("forget", &PendingCalls::forget)
      .def("drop", &PendingCalls::drop)
      .def("next_detached", &next_detached)
      .def_prop_ro("open", &PendingCalls::open)
      .def_prop_ro("connection", &PendingCalls::shared_connection);

  module.def("connect", &connect_to);
  module.def("tls_not_viable", &tls_not_viable);
  module.def("tls_lanes", [](unsigned threads) { return lanes_by_cores(true, threads); });
  module.def("transports", [] {
    nb::dict out;
    for (const Provider& provider : kProviders) out[provider.name] = provider.not_viable();
    return out;
  });
}

}  // namespace geartrain
