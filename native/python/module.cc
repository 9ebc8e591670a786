// Python module geartrain._native, one file for each part in this folder.

#include <nanobind/stl/string.h>

#include "base/copy.h"
#include "base/shared_file.h"
#include "base/threads.h"
#include "python/bind.h"
#include "python/messages.h"
#include "segment/descend.h"
#include "segment/segment.h"

namespace geartrain {
nb::dlpack::dtype array_dtype(uint8_t code, uint8_t itemsize) {
  using nb::dlpack::dtype_code;
  dtype_code kind = dtype_code::UInt;
  switch (code) {  // schema.py's DTYPES
    case 1:
      kind = dtype_code::Bool;
      break;
    case 3:
    case 5:
    case 7:
    case 9:
      kind = dtype_code::Int;
      break;
    case 10:
    case 12:
    case 13:
      kind = dtype_code::Float;
      break;
    case 15:
    case 16:
      kind = dtype_code::Complex;
      break;
    default:
      break;
  }
  return {static_cast<uint8_t>(kind), static_cast<uint8_t>(8 * itemsize), 1};
}

nb::capsule keep_alive(std::shared_ptr<Mapping> mapping) {
  return nb::capsule(new std::shared_ptr<Mapping>(std::move(mapping)),
                     [](void* p) noexcept { delete static_cast<std::shared_ptr<Mapping>*>(p); });
}

NB_MODULE(_native, module) {
  // Calls without the GIL take it again in the main interpreter (nanobind, and PyGILState): another would wait for
  // ever.
  if (PyInterpreterState_GetID(PyInterpreterState_Get()) != 0) {
    PyErr_SetString(PyExc_ImportError, "geartrain runs in the main interpreter of a process, and in no other");
    throw nb::python_error();
  }
  module.doc() = "The native layer of geartrain: use the classes of the geartrain package instead.";
  nb::set_leak_warnings(false);
  register_errors();
  module.attr("FORMAT_VERSION") = kFormatVersion;
  module.attr("MAX_CLIENTS") = kMaxClients;
  module.def("segments_directory", &segments_directory);
  module.def("has_huge_pages", &has_huge_pages, nb::arg("directory"));
  module.def("segment_path", &segment_path);
  module.def("open_shared_file", [](const std::string& path, bool writable, const std::string& trust) {
    return open_shared_file(path, writable, trust_of(trust));
  });
  module.def("share_with", [](int fd, const std::string& trust) { share_with(fd, trust_of(trust)); });
  module.def("exchange_paths", &exchange_paths);
  module.def("copy_kernel", &copy_kernel);
  module.def("available_cores", &available_cores);
  module.def("sleep_at_finalization", &sleep_at_finalization);
  bind_base(module);
  bind_store(module);
  bind_fetch(module);
  bind_packed(module);
  bind_batch(module);
  bind_row_fetcher(module);
  bind_inserter(module);
  bind_one_row_writer(module);
  bind_step_writer(module);
  bind_selection(module);
  bind_codec(module);
  bind_transport(module);
  bind_rank_exchange(module);
  bind_rank_reader(module);
  bind_collectives(module);
  bind_testing(module);
}

}  // namespace geartrain
