// CPython's macros that the stable ABI lacks, by the functions that do the same with a check.
#pragma once

#include <Python.h>

#if defined(Py_LIMITED_API)

#define PyBytes_AS_STRING PyBytes_AsString
#define PyBytes_GET_SIZE PyBytes_Size
#define PyByteArray_AS_STRING PyByteArray_AsString
#define PyByteArray_GET_SIZE PyByteArray_Size
#define PyDict_GET_SIZE PyDict_Size
#define PyFloat_AS_DOUBLE PyFloat_AsDouble
#define PyList_GET_ITEM PyList_GetItem
#define PyList_GET_SIZE PyList_Size
#define PyList_SET_ITEM PyList_SetItem
#define PyTuple_GET_ITEM PyTuple_GetItem
#define PyTuple_GET_SIZE PyTuple_Size
#define PyTuple_SET_ITEM PyTuple_SetItem

// Declared outside the stable ABI, exported by every CPython.
extern "C" int PyGILState_Check(void);

#endif
