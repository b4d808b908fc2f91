#include <ds/quant_arguments.h>
#include <ds/quant_linear.h>

namespace py = pybind11;

namespace {

int quant_linear(py::tuple spec, py::tuple rows, std::int64_t first, std::int64_t count, std::uintptr_t x,
                 std::int64_t tokens, std::uintptr_t y, std::int64_t y_stride, int threads) {
  const ds::QuantSpec s = ds::quant_spec(spec);
  const ds::QuantRows q = ds::quant_rows(rows);
  py::gil_scoped_release nogil;
  return static_cast<int>(ds::quant_linear(s, q, first, count, reinterpret_cast<const float *>(x), tokens,
                                           reinterpret_cast<float *>(y), y_stride, threads));
}

}  // namespace

void bind_quant_linear(py::module_ &m) {
  m.def("quant_linear", quant_linear, py::arg("spec"), py::arg("rows"), py::arg("first"), py::arg("count"), py::arg("x"),
        py::arg("tokens"), py::arg("y"), py::arg("y_stride"), py::arg("threads"));
}
