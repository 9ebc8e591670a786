// Encoder and decoder of the codec, and the Python objects that both use. codec.cc has the format.
#pragma once

#include "base/errors.h"
#include "python/bind.h"
#include "python/messages.h"
#include "transport/value_reader.h"

namespace geartrain {

// Python attributes that both use, looked up once.
struct Names {
  nb::object numpy_array, numpy_scalar, as_array, as_contiguous;
  nb::object numpy_codes;                              // dict: numpy dtype -> code
  nb::object torch_tensor, torch_codes, torch_dtypes;  // set once torch is there; dicts both ways
  nb::object to_plain, from_numpy;
  nb::object to_parts, from_parts;  // of the format's x
};

// Settings of a Codec (codec.cc). Under the GIL.
struct CodecTypes {
  mutable Names names;
  ValueReader::ItemSizes itemsizes{};
  nb::object torch_part, dumps, loads;
  uint32_t max_depth = 0;

  void need_torch() const {
    if (names.torch_tensor.is_valid()) return;
    const nb::tuple part = nb::cast<nb::tuple>(torch_part());
    names.torch_codes = part[1];
    names.torch_dtypes = part[2];
    names.to_plain = part[3];
    names.from_numpy = part[4];
    names.to_parts = part[5];
    names.from_parts = part[6];
    names.torch_tensor = part[0];
  }
  bool torch_is_loaded() const {
    if (names.torch_tensor.is_valid()) return true;
    PyObject* modules = PyImport_GetModuleDict();
    if (PyDict_GetItemString(modules, "torch") == nullptr) return false;
    need_torch();
    return true;
  }
};

// Owned by the caller. Throws frame for what cannot be sent, and whatever pickle raises.
Payload* encode(const CodecTypes& codec, nb::handle value, bool pickle);

// Throws frame for a malformed message, untrusted for a pickle where none is accepted.
nb::object decode(const CodecTypes& codec, const Message& message, bool pickle);

}  // namespace geartrain
