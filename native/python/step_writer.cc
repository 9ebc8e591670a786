// Binding of StepWriter (store/step_writer.h): a vector environment's arrays, by the buffer protocol, in one call.

#include "store/step_writer.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/convert.h"
#include "base/errors.h"
#include "python/bind.h"
#include "python/host_array.h"

namespace geartrain {
namespace {

// Comparing fewer bytes takes less time than others need to take the GIL.
constexpr uint64_t kComparedWithGil = 64 << 10;

// What a call leaves to do, or none. If `argument` is set, the caller converts that argument first, or only its values
// of `field`. If `to_admit` is not 0, the rate limiter admits so many rows first. In both cases nothing was done, and
// the caller calls again. Otherwise the call is done, and `keys` are those of the rows that it completed, as bytes:
// rows, then generations, then environments, uint32.
struct StepResult {
  const char* argument = nullptr;
  nb::object field = nb::none();
  size_t to_admit = 0;
  nb::object keys = nb::none();
};

class Recorder {
 public:
  Recorder(Store& store, uint32_t environments, uint32_t publish_every, uint32_t overlap,
           std::optional<double> priority, uint8_t autoreset, const std::vector<uint8_t>& roles, const nb::list& names,
           const nb::list& parts, bool share_rows)
      : store_(store), n_(environments) {
    StepWriterOptions options{environments, publish_every, overlap, priority, static_cast<Autoreset>(autoreset),
                              {},           share_rows};
    for (const uint8_t role : roles) options.roles.push_back(static_cast<FieldRole>(role));
    writer_ = std::make_unique<StepWriter>(store, options);
    for (size_t f = 0; f < options.roles.size(); ++f) {
      Named field{static_cast<uint32_t>(f), interned(names[f]), interned(parts[f])};
      if (options.roles[f] == FieldRole::observation) observations_.push_back(field);
      if (options.roles[f] == FieldRole::value) values_.push_back(field);
    }
    arrays_ = std::make_unique<HostArray[]>(values_.size() + 2 * observations_.size() + 3);
    scalars_.resize(values_.size() + 2 * observations_.size() + 3);
  }

  // Rows that are not published go back, whatever has kept Python from saying so: a signal's handler may raise
  // anywhere.
  ~Recorder() {
    try {
      abandon();
    } catch (...) {
      // The lock was not to be had, or the interpreter is ending: they come back with the process.
    }
  }
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  std::optional<StepResult> step(nb::handle observation, nb::handle values, nb::handle terminated, nb::handle truncated,
                                 nb::handle final, nb::handle mask, int64_t version, bool admitted) {
    const Use use(*this);
    std::vector<StepColumn>&given = columns_[0], &seen = columns_[1], &ends = columns_[2];
    StepInput input;
    StepResult result;
    if (!columns(values_, values, "values", &given, &result) ||
        !columns(observations_, observation, "observation", &seen, &result) ||
        (!final.is_none() && !columns(observations_, final, "final_obs", &ends, &result)) ||
        !flags(terminated, &input.terminated, "terminated", &result) ||
        !flags(truncated, &input.truncated, "truncated", &result) ||
        (!mask.is_none() && !flags(mask, &input.mask, "mask", &result))) {
      return result;
    }
    input.values = given;
    input.observations = seen;
    if (!final.is_none()) input.finals = ends;
    input.version = version;
    return result_of([&] { return writer_->step(input, admitted, &completed_); });
  }

  std::optional<StepResult> begin(nb::handle observation, nb::handle mask, int64_t version, bool admitted) {
    const Use use(*this);
    std::span<const uint8_t> chosen;
    StepResult result;
    if (!columns(observations_, observation, "observation", &columns_[1], &result) ||
        (!mask.is_none() && !flags(mask, &chosen, "mask", &result))) {
      return result;
    }
    return result_of([&] { return writer_->begin(columns_[1], chosen, version, admitted, &completed_); });
  }

  // None where every environment's newest step has these values, of a part of the fields; else bytes (n,), 1 for each
  // environment whose step has not.
  nb::object differing(nb::handle given) {
    const Use use(*this);
    std::vector<StepColumn>& values = columns_[0];
    values.clear();
    uint64_t bytes = 0;
    if (PyDict_CheckExact(given.ptr()) == 0) fail(ErrorKind::schema, "values are given in a dict, by field");
    for (const Named& field : values_) {
      PyObject* value = PyDict_GetItemWithError(given.ptr(), field.name.ptr());
      if (value == nullptr) continue;
      StepColumn column{};
      if (!column_of(field.field, value, &column) || column.convert != nullptr) {
        PyErr_Clear();
        fail(ErrorKind::schema, "'", nb::cast<std::string>(field.name), "' does not fit the store's fields");
      }
      values.push_back(column);
      bytes += n_ * bytes_per_step(store_.fields()[field.field]);
    }
    if (values.size() != static_cast<size_t>(PyDict_GET_SIZE(given.ptr()))) {
      fail(ErrorKind::schema, "values of fields that steps do not have");
    }
    const auto compare = [&] { writer_->differing(values, &differing_); };
    bytes < kComparedWithGil ? entered(store_, compare) : released(store_, compare);
    if (std::find(differing_.begin(), differing_.end(), 1) == differing_.end()) return nb::none();
    return nb::bytes(differing_.data(), differing_.size());
  }

  std::optional<StepResult> cut(nb::handle mask, bool admitted) {
    const Use use(*this);
    std::span<const uint8_t> chosen;
    StepResult result;
    if (!mask.is_none() && !flags(mask, &chosen, "mask", &result)) return result;
    return result_of([&] { return writer_->cut(chosen, admitted, &completed_); });
  }

  // The rows that hold other episodes as well, and stay.
  std::optional<StepResult> discard(uint32_t environment) {
    const Use use(*this);
    check_environment(environment);
    return result_of([&] {
      writer_->discard(environment, &completed_);
      return size_t{0};
    });
  }

  void abandon() {
    if (writer_->is_foreign()) return;  // its rows are the parent's
    const Use use(*this);
    try {
      released(store_, [&] { writer_->abandon(); });
    } catch (const Error& error) {
      if (error.kind != ErrorKind::closed) throw;  // the close gave the rows back
    }
  }

  uint64_t rows() const { return writer_->rows(); }
  std::optional<double> priority() const { return writer_->priority(); }
  void set_priority(std::optional<double> priority) {
    const Use use(*this);
    writer_->set_priority(priority);
  }
  bool in_episode(uint32_t environment) const {
    check_environment(environment);
    return writer_->in_episode(environment);
  }

 private:
  struct Named {
    uint32_t field;
    nb::object name, part;  // "observation.pixels" may be called "pixels" as well
  };
  // One call at a time.
  class Use {
   public:
    explicit Use(Recorder& recorder) : recorder_(recorder) {
      sleep_at_finalization();
      // A forked child finds it busy for ever where another thread of its parent was in a call.
      if (recorder.writer_->is_foreign()) recorder.writer_->check_usable();
      if (recorder.busy_.exchange(true)) fail(ErrorKind::schema, "two threads use one recorder at the same time");
      recorder.used_ = 0;
    }
    ~Use() {
      for (size_t i = 0; i < recorder_.used_; ++i) recorder_.arrays_[i].close();
      recorder_.busy_.store(false);
    }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    Recorder& recorder_;
  };

  void check_environment(uint32_t environment) const {
    if (environment >= n_) fail(ErrorKind::schema, "there are ", n_, " environments, none has number ", environment);
  }

  // The columns of some fields, from a dict by field or, of a single observation, from its array alone. False, with the
  // argument to be converted, where they are none.
  bool columns(const std::vector<Named>& fields, nb::handle given, const char* argument, std::vector<StepColumn>* out,
               StepResult* result) {
    out->clear();
    const bool bare = &fields == &observations_, dict = PyDict_CheckExact(given.ptr()) != 0;
    const bool all = dict && static_cast<size_t>(PyDict_GET_SIZE(given.ptr())) == fields.size();
    if (!all && (dict || !bare || fields.size() != 1)) {
      result->argument = argument;
      return false;
    }
    for (const Named& field : fields) {
      PyObject* value = dict ? PyDict_GetItemWithError(given.ptr(), field.name.ptr()) : given.ptr();
      if (value == nullptr) value = PyDict_GetItemWithError(given.ptr(), field.part.ptr());
      StepColumn column{};
      if (value == nullptr || !column_of(field.field, value, &column)) {
        PyErr_Clear();
        result->argument = argument;
        result->field = field.name;
        return false;
      }
      out->push_back(column);
    }
    return true;
  }

  bool column_of(uint32_t field, PyObject* value, StepColumn* column) {
    const FieldRecord& record = store_.fields()[field];
    const uint64_t count = bytes_per_step(record) / record.itemsize;
    uint8_t code = 0;
    column->field = field;
    if (n_ == 1 && count == 1 && scalar(value, record, &code, &column->data)) {
      column->stride = 0;
    } else {
      HostArray& array = arrays_[used_];
      if (!array.open(value)) return false;
      ++used_;
      // (n, ...), or (...) of one environment.
      const auto shape = array.shape();
      const size_t axes = size_t{record.ndim} - 1;
      const bool leading = shape.size() == axes + 1 && shape[0] == static_cast<Py_ssize_t>(n_);
      if (!leading && !(n_ == 1 && shape.size() == axes)) return false;
      for (size_t axis = 0; axis < axes; ++axis) {
        if (static_cast<uint64_t>(shape[axis + (leading ? 1 : 0)]) != record.shape[axis + 1]) return false;
      }
      code = array.code();
      column->data = array.data();
      column->stride = array.bytes() / n_;
    }
    column->convert = nullptr;
    // Of types that NumPy lacks the bytes are given, as unsigned integers.
    const bool numpy_lacks = record.dtype == 11 || record.dtype == 14 || record.dtype > 16;
    const uint8_t raw = record.itemsize == 1 ? 2 : record.itemsize == 2 ? 4 : 6;
    if (code == record.dtype || (numpy_lacks && code == raw)) return true;
    column->convert = conversion(code, record.dtype);
    return column->convert != nullptr;
  }

  // A Python number for the one environment.
  bool scalar(PyObject* value, const FieldRecord& record, uint8_t* code, const std::byte** data) {
    uint64_t& place = scalars_[used_];
    if (PyFloat_CheckExact(value) != 0) {
      const double number = PyFloat_AS_DOUBLE(value);
      std::memcpy(&place, &number, sizeof place);
      *code = kFloat64;
    } else if (PyBool_Check(value) != 0) {
      std::memset(&place, 0, sizeof place);
      *reinterpret_cast<uint8_t*>(&place) = value == Py_True;
      *code = kBool;
    } else if (PyLong_CheckExact(value) != 0) {
      int overflow = 0;
      const long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
      // Whether it is in the range of a smaller type is for the caller to check.
      const bool any = record.dtype == kInt64 || record.dtype == kFloat64 || record.dtype == kFloat32;
      if (overflow != 0 || !(any || (number >= 0 && number < 128))) return false;
      std::memcpy(&place, &number, sizeof place);
      *code = any ? kInt64 : kUint64;
    } else {
      return false;
    }
    *data = reinterpret_cast<const std::byte*>(&place);
    // Numbers may lie in scalars_ and arrays in arrays_ under one index: it is used once.
    ++used_;
    return true;
  }

  bool flags(nb::handle given, std::span<const uint8_t>* out, const char* argument, StepResult* result) {
    const size_t place = used_;
    if (n_ == 1 && PyBool_Check(given.ptr()) != 0) {
      ++used_;
      auto* flag = reinterpret_cast<uint8_t*>(&scalars_[place]);
      *flag = given.ptr() == Py_True;
      *out = {flag, 1};
      return true;
    }
    HostArray& array = arrays_[place];
    if (array.open(given.ptr())) {
      ++used_;
      const auto shape = array.shape();
      if (array.code() == kBool && array.bytes() == n_ && (shape.size() == 1 || (n_ == 1 && shape.empty()))) {
        *out = {reinterpret_cast<const uint8_t*>(array.data()), n_};
        return true;
      }
    }
    result->argument = argument;
    return false;
  }

  // Of a call that returns how many rows or steps have to be admitted first, and names the rows that it completes.
  template <typename Call>
  std::optional<StepResult> result_of(Call&& call) {
    completed_ = {};
    StepResult result;
    result.to_admit = released(store_, [&]() -> size_t { return call(); });
    const size_t n = completed_.rows.size();
    if (result.to_admit != 0) return result;
    if (n == 0) return std::nullopt;
    result.keys = nb::steal(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(12 * n)));
    if (!result.keys.is_valid()) throw nb::python_error();
    auto* out = reinterpret_cast<uint32_t*>(PyBytes_AS_STRING(result.keys.ptr()));
    std::copy(completed_.rows.begin(), completed_.rows.end(), out);
    std::copy(completed_.generations.begin(), completed_.generations.end(), out + n);
    std::copy(completed_.environments.begin(), completed_.environments.end(), out + 2 * n);
    return result;
  }

  Store& store_;
  const uint32_t n_;
  std::unique_ptr<StepWriter> writer_;
  std::vector<Named> observations_, values_;
  std::unique_ptr<HostArray[]> arrays_;
  std::vector<uint64_t> scalars_;
  size_t used_ = 0;
  std::vector<StepColumn> columns_[3];
  CompletedRows completed_;
  std::vector<uint8_t> differing_;
  std::atomic<bool> busy_{false};
};

}  // namespace

void bind_step_writer(nb::module_& module) {
  nb::class_<StepResult>(module, "StepResult")
      .def_prop_ro("argument", [](const StepResult& self) { return self.argument; })
      .def_ro("field", &StepResult::field)
      .def_ro("to_admit", &StepResult::to_admit)
      .def_ro("keys", &StepResult::keys);

  nb::class_<Recorder>(module, "StepWriter")
      .def(nb::init<Store&, uint32_t, uint32_t, uint32_t, std::optional<double>, uint8_t, const std::vector<uint8_t>&,
                    const nb::list&, const nb::list&, bool>(),
           nb::keep_alive<1, 2>(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg(),
           nb::arg(), nb::arg(), nb::arg())
      .def("step", &Recorder::step, nb::arg("observation"), nb::arg("values"), nb::arg("terminated"),
           nb::arg("truncated"), nb::arg("final").none(), nb::arg("mask").none(), nb::arg("version"),
           nb::arg("admitted"))
      .def("begin", &Recorder::begin, nb::arg("observation"), nb::arg("mask").none(), nb::arg("version"),
           nb::arg("admitted"))
      .def("differing", &Recorder::differing, nb::arg("values"))
      .def("cut", &Recorder::cut, nb::arg("mask").none(), nb::arg("admitted"))
      .def("discard", &Recorder::discard)
      .def("abandon", &Recorder::abandon)
      .def("in_episode", &Recorder::in_episode)
      .def_prop_rw("priority", &Recorder::priority, &Recorder::set_priority, nb::for_setter(nb::arg("priority").none()))
      .def_prop_ro("rows", &Recorder::rows);
}

}  // namespace geartrain
