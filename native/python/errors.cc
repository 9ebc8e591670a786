// Translation of native errors to Python's exceptions.

#include "base/errors.h"

#include <iterator>

#include "python/bind.h"

namespace geartrain {
namespace {

// The class of geartrain.errors that each kind becomes, in their order.
constexpr const char* kErrorClasses[] = {
    "SchemaError",             // schema
    "StoreExistsError",        // exists
    "StoreMissingError",       // missing
    "StaleStoreError",         // stale_store
    "IncompatibleStoreError",  // incompatible
    "StoreClosedError",        // closed
    "ReadOnlyStoreError",      // read_only
    "StoreFullError",          // full
    "EmptyStoreError",         // empty
    "NotEnoughRowsError",      // not_enough
    "TurnoverError",           // turnover
    "StaleKeyError",           // stale_key
    "StaleClaimError",         // stale_claim
    "NoSpaceError",            // no_space
    "LockTimeoutError",        // lock_timeout
    "CorruptStoreError",       // corrupt
    "UntrustedStoreError",     // untrusted_store
    "StoreIOError",            // io
    "GeartrainError",          // os
    "ArgumentError",           // argument
    "PeerLostError",           // peer_lost
    "WaitTimeoutError",        // timed_out
    "TransportError",          // not_viable
    "UntrustedPeerError",      // untrusted
    "MessageError",            // frame
    "ConnectionClosedError",   // hung_up
    "RegionError",             // region
};
static_assert(std::size(kErrorClasses) == static_cast<size_t>(ErrorKind::region) + 1);

nb::object raised_of(const Error& error) {
  const bool nobody = dynamic_cast<const NobodyListens*>(&error) != nullptr;
  const char* const name = nobody ? "ListenerGoneError" : kErrorClasses[static_cast<size_t>(error.kind)];
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
