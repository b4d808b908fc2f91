#include <ds/quant.h>
#include <ds/quant_arguments.h>

namespace py = pybind11;

namespace {

int quantize(py::tuple spec, py::tuple rows, std::uintptr_t order, std::uintptr_t x, int dtype, int threads) {
  const ds::QuantSpec s = ds::quant_spec(spec);
  const ds::QuantRows q = ds::quant_rows(rows);
  py::gil_scoped_release nogil;
  return static_cast<int>(ds::quantize(s, q, reinterpret_cast<const std::int64_t *>(order),
                                       reinterpret_cast<const void *>(x), static_cast<ds::Dtype>(dtype), threads));
}

int dequantize(py::tuple spec, py::tuple rows, std::uintptr_t index, std::int64_t count, std::uintptr_t out, int dtype,
               int threads) {
  const ds::QuantSpec s = ds::quant_spec(spec);
  const ds::QuantRows q = ds::quant_rows(rows);
  py::gil_scoped_release nogil;
  return static_cast<int>(ds::dequantize(s, q, reinterpret_cast<const std::int64_t *>(index), count,
                                         reinterpret_cast<void *>(out), static_cast<ds::Dtype>(dtype), threads));
}

int reduce(py::tuple spec, py::tuple rows, std::int64_t sources, double factor, std::uintptr_t out, int dtype,
           int threads) {
  const ds::QuantSpec s = ds::quant_spec(spec);
  const ds::QuantRows q = ds::quant_rows(rows);
  py::gil_scoped_release nogil;
  return static_cast<int>(ds::reduce(s, q, sources, static_cast<float>(factor), reinterpret_cast<void *>(out),
                                     static_cast<ds::Dtype>(dtype), threads));
}

int reduce_quantized(py::tuple spec, py::tuple rows, std::int64_t sources, double factor, py::tuple out_spec,
                     py::tuple out_rows, std::uintptr_t scratch, int threads) {
  const ds::QuantSpec s = ds::quant_spec(spec), so = ds::quant_spec(out_spec);
  const ds::QuantRows q = ds::quant_rows(rows), out = ds::quant_rows(out_rows);
  py::gil_scoped_release nogil;
  return static_cast<int>(ds::reduce_quantized(s, q, sources, static_cast<float>(factor), so, out,
                                               reinterpret_cast<float *>(scratch), threads));
}

}  // namespace

void bind_quant(py::module_ &m) {
  m.def("quantize", quantize, py::arg("spec"), py::arg("rows"), py::arg("order"), py::arg("x"), py::arg("dtype"),
        py::arg("threads"));
  m.def("dequantize", dequantize, py::arg("spec"), py::arg("rows"), py::arg("index"), py::arg("count"), py::arg("out"),
        py::arg("dtype"), py::arg("threads"));
  m.def("reduce", reduce, py::arg("spec"), py::arg("rows"), py::arg("sources"), py::arg("factor"), py::arg("out"),
        py::arg("dtype"), py::arg("threads"));
  m.def("reduce_quantized", reduce_quantized, py::arg("spec"), py::arg("rows"), py::arg("sources"), py::arg("factor"),
        py::arg("out_spec"), py::arg("out_rows"), py::arg("scratch"), py::arg("threads"));
}
