// The module `_cuda`: opens the driver and NVRTC, compiles, loads and launches. Which kernel, with which arguments: ds_ops' choosers.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "libraries.h"

namespace py = pybind11;

namespace {

ds::cuda::Driver &driver() {
  static ds::cuda::Driver one;
  return one;
}

// Why the driver cannot be used; empty if it can.
std::string open_driver(const std::string &path) {
  py::gil_scoped_release nogil;
  driver().open(path);
  return driver().problem();
}

// (name, major, minor, multiprocessors) of each device.
std::vector<py::tuple> devices() {
  std::vector<py::tuple> all;
  for (const ds::cuda::Device &d : driver().devices()) all.push_back(py::make_tuple(d.name, d.major, d.minor, d.multiprocessors));
  return all;
}

// (handle, what the driver said: empty if it loaded)
py::tuple load(std::size_t device, const py::bytes &image, const std::string &entry) {
  if (device >= driver().devices().size()) return py::make_tuple(0, "there is no such device");
  const std::string bytes = image;
  ds::cuda::Function function = nullptr;
  ds::cuda::Code code = 0;
  {
    py::gil_scoped_release nogil;
    code = driver().load(device, bytes.data(), entry.c_str(), &function);
  }
  return py::make_tuple(reinterpret_cast<std::uintptr_t>(function), code ? driver().text(code) : "");
}

// What the driver says of the launch: empty if it is queued.
std::string launch(std::size_t device, std::uintptr_t function, unsigned blocks, unsigned threads, const py::bytes &arguments,
                   std::uintptr_t stream) {
  if (device >= driver().devices().size()) return "there is no such device";
  char *bytes = nullptr;
  Py_ssize_t size = 0;
  if (PyBytes_AsStringAndSize(arguments.ptr(), &bytes, &size)) throw py::error_already_set();
  ds::cuda::Code code = 0;
  {
    py::gil_scoped_release nogil;  // a full queue makes the driver wait
    code = driver().launch(device, reinterpret_cast<ds::cuda::Function>(function), blocks, threads, bytes,
                           static_cast<std::size_t>(size), reinterpret_cast<ds::cuda::Stream>(stream));
  }
  return code ? driver().text(code) : "";
}

// (image: empty if it failed, what the compiler said)
py::tuple compile(const ds::cuda::Compiler &self, const std::string &source, const std::string &name,
                  const std::vector<std::string> &options, bool ptx) {
  std::string image, log;
  bool done = false;
  {
    py::gil_scoped_release nogil;
    done = self.compile(source, name, options, ptx, &image, &log);
  }
  return py::make_tuple(py::bytes(done ? image : ""), log);
}

}  // namespace

PYBIND11_MODULE(_cuda, m) {
  m.doc() = "Launches CUDA kernels of ds_ops through the driver; called through ds_ops.cuda_launch only";
  m.def("open_driver", open_driver, py::arg("path"));
  m.def("driver_version", [] { return driver().version(); });
  m.def("devices", devices);
  m.def("load", load, py::arg("device"), py::arg("image"), py::arg("entry"));
  m.def("launch", launch, py::arg("device"), py::arg("function"), py::arg("blocks"), py::arg("threads"), py::arg("arguments"),
        py::arg("stream"));
  py::class_<ds::cuda::Compiler>(m, "Compiler")
      .def(py::init([](const std::string &path, const std::string &builtins) {
             ds::cuda::Compiler one;
             one.open(path, builtins);
             return one;
           }),
           py::arg("path"), py::arg("builtins"))
      .def_property_readonly("problem", &ds::cuda::Compiler::problem)
      .def_property_readonly("version", [](const ds::cuda::Compiler &c) { return py::make_tuple(c.major(), c.minor()); })
      .def_property_readonly("architectures", &ds::cuda::Compiler::architectures)
      .def("compile", compile, py::arg("source"), py::arg("name"), py::arg("options"), py::arg("ptx"));
}
