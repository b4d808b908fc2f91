#include <ds/sum.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

namespace py = pybind11;

namespace {

// Sum i is of n[i] elements: dst[i] = src[i * count] + ... + src[i * count + count - 1]; partials are those of the longest.
// norms: [2 * n.size()], of each sum its squares' sum and its largest magnitude.
int sum_ranges(const std::vector<std::uintptr_t> &dst, const std::vector<std::uintptr_t> &src, int count, int dtype,
               const std::vector<std::int64_t> &n, std::uintptr_t norms, std::uintptr_t partials, int threads) {
  ds::Status s = ds::Status::ok;
  if (n.size() != dst.size() || count < 1 || src.size() != dst.size() * static_cast<std::size_t>(count))
    return static_cast<int>(ds::Status::bad_argument);
  std::vector<const void *> sources;
  for (std::uintptr_t address : src) sources.push_back(reinterpret_cast<const void *>(address));
  py::gil_scoped_release nogil;
  for (std::size_t i = 0; i < dst.size() && s == ds::Status::ok; i++)
    s = ds::sum_sources(reinterpret_cast<void *>(dst[i]), sources.data() + i * static_cast<std::size_t>(count), count,
                        static_cast<ds::Dtype>(dtype), n[i], reinterpret_cast<ds::Norms *>(partials),
                        reinterpret_cast<ds::Norms *>(norms) + i, threads);
  return static_cast<int>(s);
}

}  // namespace

void bind_sum(py::module_ &m) {
  m.def("sum_ranges", sum_ranges, py::arg("dst"), py::arg("src"), py::arg("count"), py::arg("dtype"), py::arg("n"),
        py::arg("norms"), py::arg("partials"), py::arg("threads"));
}
