// What the native halves need of Python: references, exceptions, arguments and results, types. It is little beside what
// pybind11 and torch's own headers for it are, which take most of the time that a build takes.
#pragma once

#include "tensors.h"

#include <ATen/core/Generator.h>
#include <c10/core/CPUAllocator.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Export.h>
#include <torch/csrc/Generator.h>

#include <structmember.h>

#include <exception>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

// Declared here as torch/csrc/Exceptions.h and torch/csrc/autograd/python_variable.h do.
namespace torch {
TORCH_PYTHON_API void translate_exception_to_python(const std::exception_ptr&);
}
TORCH_PYTHON_API extern PyObject* THPVariableClass;
TORCH_PYTHON_API extern PyObject* ParameterClass;
TORCH_PYTHON_API PyObject* THPVariable_Wrap(at::TensorBase&&);

namespace pygraph {

// -- references and exceptions -----------------------------------------------------------------------------------------

// Python's own error is set. Nothing of torch's may see it, which would put its own text in place of that.
struct PythonError : std::exception {};

[[noreturn]] inline void raise(PyObject* type, const std::string& text) {
  PyErr_SetString(type, text.c_str());
  throw PythonError();
}

// A reference that is owned. Made, copied and dropped under the GIL.
class Object {
 public:
  Object() = default;
  Object(const Object& other) : pointer_(other.pointer_) { Py_XINCREF(pointer_); }
  Object(Object&& other) noexcept : pointer_(std::exchange(other.pointer_, nullptr)) {}
  Object& operator=(Object other) noexcept {
    std::swap(pointer_, other.pointer_);
    return *this;
  }
  ~Object() { Py_XDECREF(pointer_); }

  // What a function of Python's returned: null where it failed.
  static Object made(PyObject* pointer) {
    if (pointer == nullptr) throw PythonError();
    Object object;
    object.pointer_ = pointer;
    return object;
  }

  static Object borrowed(PyObject* pointer) {
    Py_INCREF(pointer);
    return made(pointer);
  }

  static Object none() { return borrowed(Py_None); }

  PyObject* ptr() const { return pointer_; }
  PyObject* release() { return std::exchange(pointer_, nullptr); }
  explicit operator bool() const { return pointer_ != nullptr; }

 private:
  PyObject* pointer_ = nullptr;
};

struct WithGil {
  PyGILState_STATE state = PyGILState_Ensure();
  WithGil() = default;
  WithGil(const WithGil&) = delete;
  ~WithGil() { PyGILState_Release(state); }
};

struct WithoutGil {
  PyThreadState* state = PyEval_SaveThread();
  WithoutGil() = default;
  WithoutGil(const WithoutGil&) = delete;
  ~WithoutGil() { PyEval_RestoreThread(state); }
};

// -- tensors -----------------------------------------------------------------------------------------------------------

// How torch's tensors begin in Python: see `check_tensors`.
struct PythonTensor {
  PyObject_HEAD
  Tensor tensor;
};

// A subclass may have its own semantics; a parameter has those of a tensor.
inline bool is_exact_tensor(PyObject* object) {
  auto* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  return type == THPVariableClass || type == ParameterClass;
}

inline const Tensor& tensor_in(PyObject* object) {
  return reinterpret_cast<PythonTensor*>(object)->tensor;
}

inline Object wrap(Tensor tensor) {
  return Object::made(THPVariable_Wrap(std::move(tensor)));
}

// Raises ImportError where this torch lays tensors out in another way than is assumed here.
inline void check_tensors() {
  auto storage = new_storage(8, *c10::GetCPUAllocator());
  auto keys = DispatchKeySet(DispatchKey::CPU);
  auto tensor = tensor_over(std::move(storage), keys, caffe2::TypeMeta::Make<uint8_t>(), {8}, {1}, 0);
  auto object = wrap(tensor);
  auto large = Py_TYPE(object.ptr())->tp_basicsize >= static_cast<Py_ssize_t>(sizeof(PythonTensor));
  void* found = nullptr;
  if (large) std::memcpy(&found, &tensor_in(object.ptr()), sizeof found);
  if (found != tensor.unsafeGetTensorImpl()) raise(PyExc_ImportError, "this torch has another layout of tensors");
}

// -- arguments and results ---------------------------------------------------------------------------------------------

// `Cast<T>::from` makes a T of a Python object, `Cast<T>::to` the reverse. Both throw PythonError.
template <typename T, typename = void>
struct Cast;

template <typename T>
struct Cast<T, std::enable_if_t<std::is_integral_v<T> && !std::is_same_v<T, bool>>> {
  static T from(PyObject* object) {
    auto index = Object::made(PyNumber_Index(object));
    if constexpr (std::is_signed_v<T>) {
      auto value = PyLong_AsLongLong(index.ptr());
      if (value == -1 && PyErr_Occurred()) throw PythonError();
      return narrow(value);
    } else {
      auto value = PyLong_AsUnsignedLongLong(index.ptr());
      if (value == static_cast<unsigned long long>(-1) && PyErr_Occurred()) throw PythonError();
      return narrow(value);
    }
  }

  static PyObject* to(T value) {
    if constexpr (std::is_signed_v<T>) return PyLong_FromLongLong(value);
    return PyLong_FromUnsignedLongLong(value);
  }

 private:
  template <typename V>
  static T narrow(V value) {
    if (static_cast<V>(static_cast<T>(value)) != value) raise(PyExc_OverflowError, "a number is out of range");
    return static_cast<T>(value);
  }
};

template <>
struct Cast<bool> {
  static bool from(PyObject* object) {
    auto truth = PyObject_IsTrue(object);
    if (truth < 0) throw PythonError();
    return truth != 0;
  }
  static PyObject* to(bool value) { return PyBool_FromLong(value); }
};

template <>
struct Cast<float> {
  static float from(PyObject* object) {
    auto value = PyFloat_AsDouble(object);
    if (value == -1 && PyErr_Occurred()) throw PythonError();
    return static_cast<float>(value);
  }
};

template <>
struct Cast<Object> {
  static Object from(PyObject* object) { return Object::borrowed(object); }
  static PyObject* to(Object object) { return object.release(); }
};

// Bytes, or text in UTF-8.
template <>
struct Cast<std::string> {
  static std::string from(PyObject* object) {
    char* data = nullptr;
    Py_ssize_t size = 0;
    if (PyUnicode_Check(object)) {
      data = const_cast<char*>(PyUnicode_AsUTF8AndSize(object, &size));
      if (data == nullptr) throw PythonError();
    } else if (PyBytes_AsStringAndSize(object, &data, &size) != 0) {
      throw PythonError();
    }
    return {data, static_cast<size_t>(size)};
  }
  static PyObject* to(const std::string& text) { return PyUnicode_FromStringAndSize(text.data(), text.size()); }
};

template <>
struct Cast<Tensor> {
  static Tensor from(PyObject* object) {
    auto found = PyObject_IsInstance(object, THPVariableClass);
    if (found < 0) throw PythonError();
    if (found == 0) raise(PyExc_TypeError, "a tensor was expected");
    return tensor_in(object);
  }
  static PyObject* to(Tensor tensor) { return wrap(std::move(tensor)).release(); }
};

template <>
struct Cast<at::Generator> {
  static at::Generator from(PyObject* object) {
    auto found = THPGenerator_Check(object);
    if (found < 0) throw PythonError();
    if (found == 0) raise(PyExc_TypeError, "a generator was expected");
    return reinterpret_cast<THPGenerator*>(object)->cdata;
  }
};

template <>
struct Cast<at::ScalarType> {
  static at::ScalarType from(PyObject* object) {
    if (!THPDtype_Check(object)) raise(PyExc_TypeError, "a dtype was expected");
    return reinterpret_cast<THPDtype*>(object)->scalar_type;
  }
};

template <typename T>
struct Cast<T, std::enable_if_t<std::is_enum_v<T> && !std::is_same_v<T, at::ScalarType>>> {
  static T from(PyObject* object) { return static_cast<T>(Cast<int64_t>::from(object)); }
};

template <typename T>
struct Cast<std::optional<T>> {
  static std::optional<T> from(PyObject* object) {
    return object == Py_None ? std::nullopt : std::optional<T>(Cast<T>::from(object));
  }
};

template <typename T>
struct Cast<std::vector<T>> {
  static std::vector<T> from(PyObject* object) {
    auto items = Object::made(PySequence_Fast(object, "a sequence was expected"));
    std::vector<T> values;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items.ptr()); ++i) {
      values.push_back(Cast<T>::from(PySequence_Fast_GET_ITEM(items.ptr(), i)));
    }
    return values;
  }

  static PyObject* to(const std::vector<T>& values) {
    auto list = Object::made(PyList_New(static_cast<Py_ssize_t>(values.size())));
    for (size_t i = 0; i < values.size(); ++i) {
      auto item = Object::made(Cast<T>::to(values[i]));
      PyList_SET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i), item.release());
    }
    return list.release();
  }
};

template <typename... T>
struct Cast<std::tuple<T...>> {
  static PyObject* to(const std::tuple<T...>& values) {
    auto made = [](const T&... each) { return std::vector<Object>{Object::made(Cast<T>::to(each))...}; };
    auto items = std::apply(made, values);
    auto tuple = Object::made(PyTuple_New(sizeof...(T)));
    for (size_t i = 0; i < items.size(); ++i) {
      PyTuple_SET_ITEM(tuple.ptr(), static_cast<Py_ssize_t>(i), items[i].release());
    }
    return tuple.release();
  }
};

template <typename A, typename B>
struct Cast<std::pair<A, B>> {
  static std::pair<A, B> from(PyObject* object) {
    auto items = Object::made(PySequence_Fast(object, "a pair was expected"));
    if (PySequence_Fast_GET_SIZE(items.ptr()) != 2) raise(PyExc_TypeError, "a pair was expected");
    auto** item = PySequence_Fast_ITEMS(items.ptr());
    return {Cast<A>::from(item[0]), Cast<B>::from(item[1])};
  }
  static PyObject* to(const std::pair<A, B>& pair) { return Cast<std::tuple<A, B>>::to(pair); }
};

// -- functions and types -----------------------------------------------------------------------------------------------

// Runs `f`; what it throws becomes Python's error.
template <typename F>
PyObject* guarded(F&& f) noexcept {
  try {
    return f();
  } catch (const PythonError&) {
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
  }
  return nullptr;
}

template <typename R, typename... A, typename F, size_t... I>
PyObject* call_with_each(F&& f, PyObject* const* args, std::index_sequence<I...>) {
  std::tuple<std::decay_t<A>...> values{Cast<std::decay_t<A>>::from(args[I])...};
  if constexpr (std::is_void_v<R>) {
    f(static_cast<A>(std::get<I>(values))...);
    return Py_NewRef(Py_None);
  } else {
    return Cast<std::decay_t<R>>::to(f(static_cast<A>(std::get<I>(values))...));
  }
}

// `f`, called with as many Python objects as it has parameters.
template <typename R, typename... A, typename F>
PyObject* call_with(F&& f, PyObject* const* args, Py_ssize_t count) {
  if (count != sizeof...(A)) {
    raise(PyExc_TypeError, std::to_string(sizeof...(A)) + " arguments are needed, not " + std::to_string(count));
  }
  return call_with_each<R, A...>(f, args, std::index_sequence_for<A...>());
}

// A Python object that holds a T.
template <typename T>
struct Instance {
  PyObject_HEAD
  PyObject* weak_references;
  std::shared_ptr<T> value;

  static inline PyTypeObject* type = nullptr;
  static std::shared_ptr<T>& of(PyObject* object) { return reinterpret_cast<Instance*>(object)->value; }
};

template <typename T>
struct Cast<std::shared_ptr<T>> {
  static std::shared_ptr<T> from(PyObject* object) {
    if (Py_TYPE(object) != Instance<T>::type) raise(PyExc_TypeError, "an object of another type was expected");
    return Instance<T>::of(object);
  }
};

// The C function behind `f`.
template <auto f>
struct BoundFunction {
  static PyObject* call(PyObject*, PyObject* const* args, Py_ssize_t count) noexcept {
    return guarded([&] { return forward(f, args, count); });
  }

 private:
  template <typename R, typename... A>
  static PyObject* forward(R (*function)(A...), PyObject* const* args, Py_ssize_t count) {
    return call_with<R, A...>(function, args, count);
  }
};

// The C function behind `f`: a method of T, or a function whose first parameter is a T.
template <typename T, auto f>
struct Bound {
  static PyObject* call(PyObject* self, PyObject* const* args, Py_ssize_t count) noexcept {
    return guarded([&] { return forward(f, self, args, count); });
  }

 private:
  template <typename R, typename... A>
  static PyObject* forward(R (*function)(T&, A...), PyObject* self, PyObject* const* args, Py_ssize_t count) {
    auto& object = *Instance<T>::of(self);
    auto bound = [&](A... each) -> R { return function(object, static_cast<A>(each)...); };
    return call_with<R, A...>(bound, args, count);
  }

  template <typename C, typename R, typename... A>
  static PyObject* forward(R (C::*method)(A...), PyObject* self, PyObject* const* args, Py_ssize_t count) {
    auto& object = *Instance<T>::of(self);
    auto bound = [&](A... each) -> R { return (object.*method)(static_cast<A>(each)...); };
    return call_with<R, A...>(bound, args, count);
  }

  template <typename C, typename R, typename... A>
  static PyObject* forward(R (C::*method)(A...) const, PyObject* self, PyObject* const* args, Py_ssize_t count) {
    const auto& object = *Instance<T>::of(self);
    auto bound = [&](A... each) -> R { return (object.*method)(static_cast<A>(each)...); };
    return call_with<R, A...>(bound, args, count);
  }
};

// For a method that is called often, with one argument that it reads itself.
template <typename T, Object (T::*method)(PyObject*)>
PyObject* call_directly(PyObject* self, PyObject* argument) noexcept {
  return guarded([&] { return (Instance<T>::of(self).get()->*method)(argument).release(); });
}

template <typename T, typename... A>
struct Maker {
  static PyObject* make(PyTypeObject* type, PyObject* args, PyObject* names) noexcept {
    return guarded([&] {
      if (names != nullptr && PyDict_GET_SIZE(names) != 0) raise(PyExc_TypeError, "arguments have no names here");
      auto made = [](A... each) { return std::make_shared<T>(static_cast<A>(each)...); };
      std::shared_ptr<T> value;
      auto keep = [&](A... each) { value = made(static_cast<A>(each)...); };
      auto items = Object::made(PySequence_Fast(args, ""));
      Object::made(call_with<void, A...>(keep, PySequence_Fast_ITEMS(items.ptr()), PyTuple_GET_SIZE(args)));
      auto self = Object::made(type->tp_alloc(type, 0));
      new (&Instance<T>::of(self.ptr())) std::shared_ptr<T>(std::move(value));
      return self.release();
    });
  }
};

// The type that holds a T, while its methods are named. It becomes part of the module when that is over.
template <typename T>
class Type {
 public:
  Type(PyObject* module, const char* name) : module_(module), name_(name) {
    name_ = std::string(PyModule_GetName(module)) + "." + name;
  }

  template <typename... A>
  Type& init() {
    make_ = &Maker<T, A...>::make;
    return *this;
  }

  template <auto f>
  Type& def(const char* name) {
    return add(name, reinterpret_cast<PyCFunction>(&Bound<T, f>::call), METH_FASTCALL);
  }

  template <Object (T::*method)(PyObject*)>
  Type& def_directly(const char* name) {
    return add(name, &call_directly<T, method>, METH_O);
  }

  void finish() {
    static std::vector<PyMethodDef> kept; // Python refers to it
    methods_.push_back({nullptr, nullptr, 0, nullptr});
    kept = std::move(methods_);
    static PyMemberDef members[] = {{"__weaklistoffset__", T_PYSSIZET, sizeof(PyObject), READONLY, nullptr}, {}};
    PyType_Slot slots[] = {
        {Py_tp_members, members},
        {Py_tp_new, reinterpret_cast<void*>(make_)},
        {Py_tp_dealloc, reinterpret_cast<void*>(&Type::drop)},
        {Py_tp_methods, kept.data()},
        {0, nullptr}};
    PyType_Spec spec{name_.c_str(), sizeof(Instance<T>), 0, Py_TPFLAGS_DEFAULT, slots};
    auto type = Object::made(PyType_FromSpec(&spec));
    auto plain = name_.substr(name_.rfind('.') + 1);
    if (PyObject_SetAttrString(module_, plain.c_str(), type.ptr()) != 0) throw PythonError();
    Instance<T>::type = reinterpret_cast<PyTypeObject*>(type.release());
  }

 private:
  Type& add(const char* name, PyCFunction function, int flags) {
    methods_.push_back({name, function, flags, nullptr});
    return *this;
  }

  static void drop(PyObject* self) {
    auto* type = Py_TYPE(self);
    if (reinterpret_cast<Instance<T>*>(self)->weak_references != nullptr) PyObject_ClearWeakRefs(self);
    Instance<T>::of(self).~shared_ptr();
    type->tp_free(self);
    Py_DECREF(type);
  }

  PyObject* module_;
  std::string name_;
  newfunc make_ = nullptr;
  std::vector<PyMethodDef> methods_;
};

template <auto f>
void def(PyObject* module, const char* name) {
  static PyMethodDef definition{name, reinterpret_cast<PyCFunction>(&BoundFunction<f>::call), METH_FASTCALL, nullptr};
  auto function = Object::made(PyCFunction_New(&definition, nullptr));
  if (PyObject_SetAttrString(module, name, function.ptr()) != 0) throw PythonError();
}

// The module `name`, filled by `bind`.
template <void (*bind)(PyObject*)>
PyObject* make_module(const char* name) noexcept {
  return guarded([&] {
    static PyModuleDef definition{PyModuleDef_HEAD_INIT, name, nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
    auto module = Object::made(PyModule_Create(&definition));
    check_tensors();
    bind(module.ptr());
    return module.release();
  });
}

} // namespace pygraph
