#include <ds/sum.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

namespace py = pybind11;

namespace {

py::tuple sum_sources(std::uintptr_t dst, const std::vector<std::uintptr_t> &src, int dtype, std::int64_t n,
                      std::uintptr_t partials, int threads) {
  double squares = 0.0;
  ds::Status s;
  std::vector<const void *> sources;
  for (std::uintptr_t address : src) sources.push_back(reinterpret_cast<const void *>(address));
  {
    py::gil_scoped_release nogil;
    s = ds::sum_sources(reinterpret_cast<void *>(dst), sources.data(), static_cast<int>(sources.size()),
                        static_cast<ds::Dtype>(dtype), n, reinterpret_cast<double *>(partials), &squares, threads);
  }
  return py::make_tuple(static_cast<int>(s), squares);
}

}  // namespace

void bind_sum(py::module_ &m) {
  m.def("sum_sources", sum_sources, py::arg("dst"), py::arg("src"), py::arg("dtype"), py::arg("n"), py::arg("partials"),
        py::arg("threads"));
}
