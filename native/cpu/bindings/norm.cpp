#include <ds/norm.h>
#include <pybind11/pybind11.h>

namespace py = pybind11;

namespace {

template <class T>
T *pointer(const py::handle &address) {
  return reinterpret_cast<T *>(address.cast<std::uintptr_t>());
}

// addresses: x, residual, weight, sum, y, rstd; 0 where absent.
int norm(double eps, std::int64_t rows, std::int64_t cols, int dtype, py::tuple a, std::uintptr_t scratch,
         int threads) {
  const ds::Norm n = {eps, rows, cols, static_cast<ds::Dtype>(dtype), pointer<const void>(a[0]),
                      pointer<const void>(a[1]), pointer<const float>(a[2]), pointer<void>(a[3]),
                      pointer<void>(a[4]), pointer<float>(a[5])};
  py::gil_scoped_release nogil;
  return static_cast<int>(ds::norm(n, reinterpret_cast<float *>(scratch), threads));
}

// addresses: h, dy, dsum, weight, rstd, dx, dweight; 0 where absent.
int norm_grad(std::int64_t rows, std::int64_t cols, int dtype, py::tuple a, std::uintptr_t scratch,
              int threads) {
  const ds::NormGrad n = {rows, cols, static_cast<ds::Dtype>(dtype), pointer<const void>(a[0]),
                          pointer<const void>(a[1]), pointer<const void>(a[2]), pointer<const float>(a[3]),
                          pointer<const float>(a[4]), pointer<void>(a[5]), pointer<float>(a[6])};
  py::gil_scoped_release nogil;
  return static_cast<int>(ds::norm_grad(n, reinterpret_cast<float *>(scratch), threads));
}

}  // namespace

void bind_norm(py::module_ &m) {
  m.def("norm", norm, py::arg("eps"), py::arg("rows"), py::arg("cols"), py::arg("dtype"),
        py::arg("addresses"), py::arg("scratch"), py::arg("threads"));
  m.def("norm_grad", norm_grad, py::arg("rows"), py::arg("cols"), py::arg("dtype"),
        py::arg("addresses"), py::arg("scratch"), py::arg("threads"));
  m.attr("norm_grad_blocks") = ds::norm_grad_blocks;
}
