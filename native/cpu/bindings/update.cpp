#include <ds/isa.h>
#include <ds/update.h>
#include <pybind11/pybind11.h>

namespace py = pybind11;

namespace {

// `rows` is the address of int64[6][count]: numel, param, grad, state0, state1, copy; a row whose first entry is -1 is
// absent. `dtypes` packs the four element types, one byte each: param, grad, state, copy.
int update(int rule, py::tuple coefficients, double grad_scale, bool zero_grad, std::int64_t rows, std::int64_t count,
           std::uint32_t dtypes, std::uintptr_t ratio, std::uintptr_t partials, int threads) {
  ds::Update u = {};
  u.rule = static_cast<ds::Rule>(rule);
  u.zero_grad = zero_grad;
  u.grad_scale = static_cast<float>(grad_scale);
  if (coefficients.size() > ds::max_coefficients) return static_cast<int>(ds::Status::bad_argument);
  for (std::size_t i = 0; i < coefficients.size(); i++) u.c[i] = static_cast<float>(coefficients[i].cast<double>());
  u.ratio = reinterpret_cast<const float *>(ratio);
  u.partials = reinterpret_cast<double *>(partials);
  const std::int64_t *table = reinterpret_cast<const std::int64_t *>(rows);
  auto row = [&](int i) { return count > 0 && table[i * count] != -1 ? table + i * count : nullptr; };
  auto dtype = [&](int i) { return static_cast<ds::Dtype>(dtypes >> (8 * i) & 0xff); };
  u.list = {count, table, row(1), row(2), row(3), row(4), row(5), dtype(0), dtype(1), dtype(2), dtype(3)};
  py::gil_scoped_release nogil;
  return static_cast<int>(ds::update(u, threads));
}

}  // namespace

void bind_update(py::module_ &m) {
  m.def("update", update, py::arg("rule"), py::arg("coefficients"), py::arg("grad_scale"), py::arg("zero_grad"),
        py::arg("rows"), py::arg("count"), py::arg("dtypes"), py::arg("ratio"), py::arg("partials"),
        py::arg("threads"));
  m.def("isa_name", ds::isa_name);
  m.def("isa_supported", ds::isa_supported);
  m.attr("update_block") = ds::update_block;
}
