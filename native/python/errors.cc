// Translation of native errors to Python's exceptions.

#include "base/errors.h"

#include "python/bind.h"

namespace geartrain {
namespace {

// The class of geartrain.errors that each kind becomes.
const char* error_class(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::schema:
      return "SchemaError";
    case ErrorKind::exists:
      return "StoreExistsError";
    case ErrorKind::missing:
      return "StoreMissingError";
    case ErrorKind::stale_store:
      return "StaleStoreError";
    case ErrorKind::incompatible:
      return "IncompatibleStoreError";
    case ErrorKind::closed:
      return "StoreClosedError";
    case ErrorKind::read_only:
      return "ReadOnlyStoreError";
    case ErrorKind::full:
      return "StoreFullError";
    case ErrorKind::empty:
      return "EmptyStoreError";
    case ErrorKind::not_enough:
      return "NotEnoughRowsError";
    case ErrorKind::turnover:
      return "TurnoverError";
    case ErrorKind::stale_key:
      return "StaleKeyError";
    case ErrorKind::stale_claim:
      return "StaleClaimError";
    case ErrorKind::no_space:
      return "NoSpaceError";
    case ErrorKind::lock_timeout:
      return "LockTimeoutError";
    case ErrorKind::corrupt:
      return "CorruptStoreError";
    case ErrorKind::untrusted_store:
      return "UntrustedStoreError";
    case ErrorKind::io:
      return "StoreIOError";
    case ErrorKind::os:
      return "GeartrainError";
    case ErrorKind::argument:
      return "ArgumentError";
    case ErrorKind::peer_lost:
      return "PeerLostError";
    case ErrorKind::timed_out:
      return "WaitTimeoutError";
    case ErrorKind::not_viable:
      return "TransportError";
    case ErrorKind::untrusted:
      return "UntrustedPeerError";
    case ErrorKind::frame:
      return "MessageError";
    case ErrorKind::hung_up:
      return "ConnectionClosedError";
    case ErrorKind::region:
      return "RegionError";
  }
  return "GeartrainError";
}

nb::object raised_of(const Error& error) {
  const bool nobody = dynamic_cast<const NobodyListens*>(&error) != nullptr;
  const char* const name = nobody ? "ListenerGoneError" : error_class(error.kind);
  nb::object raised = nb::module_::import_("geartrain.errors").attr(name)(error.what());
  if (const auto* unreached = dynamic_cast<const MembersUnreached*>(&error)) {
    nb::list members;
    for (const uint32_t member : unreached->members) members.append(member);
    raised.attr("members") = nb::tuple(members);
  }
  return raised;
}

void translate(const std::exception_ptr& pointer, void*) {
  sleep_at_finalization();
  try {
    std::rethrow_exception(pointer);
  } catch (const Error& error) {
    const nb::object raised = raised_of(error);
    PyErr_SetObject(raised.type().ptr(), raised.ptr());
  }
}

}  // namespace

nb::object caught() {
  try {
    throw;
  } catch (const Error& error) {
    return raised_of(error);
  } catch (const nb::python_error& error) {
    return nb::borrow(error.value());
  } catch (const std::bad_alloc&) {
    return nb::handle(PyExc_MemoryError)();
  }
}

void register_errors() {
  nb::register_exception_translator(translate);
}

}  // namespace geartrain
