// Encoder and decoder of the codec, and the Python objects that both use. codec.cc has the format.
#pragma once

#include "base/errors.h"
#include "python/bind.h"
#include "python/messages.h"
#include "python/numpy_arrays.h"
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
  NumpyArrays arrays;
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

// Into an empty payload. Throws frame for what cannot be sent, and whatever pickle raises.
void encode(const CodecTypes& codec, nb::handle value, bool pickle, Payload* payload);

// Throws frame for a malformed message, untrusted for a pickle where none is accepted.
nb::object decode(const CodecTypes& codec, const Message& message, bool pickle);

// What Python has of both.
class Codec {
 public:
  // `numpy_codes`: dict of numpy dtypes to codes; `itemsizes`: dict of codes to sizes; `torch_part`: called once torch
  // is needed, returns (Tensor, dict of dtypes to codes, dict of codes to dtypes, function to a plain CPU tensor,
  // from_numpy, function to (kind, value) or None for the format's x, and its inverse). `dumps(value, add_buffer)` and
  // `loads(bytes, buffers)` are for what only pickle can do.
  Codec(nb::dict numpy_codes, const nb::dict& itemsizes, nb::object torch_part, nb::object dumps, nb::object loads,
        uint32_t max_depth);
  Payload* encode(nb::handle value, bool pickle) const;
  nb::object decode(const Message& message, bool pickle) const;

  // Encodes a call or its answer into an empty payload, and returns the message's kind.
  // `tensors.out_of_band(value, encodable, tag, until_s)` is called with a value that cannot be encoded
  // (MessageError), or that takes kOutOfBandBytes or more. It returns None, or (bit of the kind, value): then that
  // value is encoded in place of the one given. Throws what encode() does, and what the function raises.
  uint32_t encode_message(uint32_t kind, nb::handle value, bool pickle, nb::handle tensors, uint64_t tag,
                          double until_s, Payload* payload) const;
  static constexpr size_t kOutOfBandBytes = size_t{256} << 10;

  // For a binding that decodes what it receives: the value; or None, and what decode() has raised.
  struct Decoded {
    nb::object value, error;
  };
  Decoded decode_message(const Message& message, bool pickle) const;

 private:
  CodecTypes types_;
};

}  // namespace geartrain
