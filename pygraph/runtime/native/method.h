// Methods that Python calls without pybind11's dispatch, which costs as much as checking several arguments.
#pragma once

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

namespace pygraph {

// The C function behind a method that takes one argument. `self` is a capsule with the object.
template <typename T, py::object (T::*method)(py::handle)>
PyObject* call_method(PyObject* self, PyObject* argument) {
  HANDLE_TH_ERRORS
  auto* object = static_cast<T*>(PyCapsule_GetPointer(self, nullptr));
  if (object == nullptr) throw python_error();
  return (object->*method)(argument).release().ptr();
  END_HANDLE_TH_ERRORS
}

inline void release_owner(PyObject* capsule) {
  Py_XDECREF(static_cast<PyObject*>(PyCapsule_GetContext(capsule)));
}

// `method` as an attribute of `T`: a built-in function that keeps its object alive.
template <typename T, py::object (T::*method)(py::handle)>
void def_method(py::class_<T>& type, const char* name) {
  static PyMethodDef definition{name, &call_method<T, method>, METH_O, nullptr};
  type.def_property_readonly(name, [](py::object self) {
    auto capsule = py::reinterpret_steal<py::object>(PyCapsule_New(&self.cast<T&>(), nullptr, &release_owner));
    if (!capsule) throw py::error_already_set();
    if (PyCapsule_SetContext(capsule.ptr(), self.ptr()) != 0) throw py::error_already_set();
    self.release();
    auto function = py::reinterpret_steal<py::object>(PyCFunction_New(&definition, capsule.ptr()));
    if (!function) throw py::error_already_set();
    return function;
  });
}

} // namespace pygraph
