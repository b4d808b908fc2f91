#include <ds/stream.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

namespace py = pybind11;

namespace {

template <class T>
T *pointer(std::uintptr_t address) {
  return reinterpret_cast<T *>(address);
}
ds::Dtype dtype(int number) { return static_cast<ds::Dtype>(number); }

// norms: [2 * x.size()], of each array the sum of squares and the largest magnitude; partials are those of the longest.
int measure_ranges(const std::vector<std::uintptr_t> &x, int x_dtype, const std::vector<std::int64_t> &n,
                   std::uintptr_t norms, std::uintptr_t partials, int threads) {
  if (n.size() != x.size()) return static_cast<int>(ds::Status::bad_argument);
  py::gil_scoped_release nogil;
  ds::Status s = ds::Status::ok;
  for (std::size_t i = 0; i < x.size() && s == ds::Status::ok; i++)
    s = ds::measure(pointer<void>(x[i]), dtype(x_dtype), n[i], pointer<ds::Norms>(partials), pointer<ds::Norms>(norms) + i,
                    threads);
  return static_cast<int>(s);
}

int convert(std::uintptr_t dst, int dst_dtype, std::uintptr_t src, int src_dtype, std::int64_t n, double scale,
            int threads) {
  py::gil_scoped_release nogil;
  return static_cast<int>(ds::convert(pointer<void>(dst), dtype(dst_dtype), pointer<void>(src), dtype(src_dtype), n,
                                      static_cast<float>(scale), threads));
}

int fill(std::uintptr_t dst, int dst_dtype, std::int64_t n, double value, int threads) {
  py::gil_scoped_release nogil;
  return static_cast<int>(ds::fill(pointer<void>(dst), dtype(dst_dtype), n, static_cast<float>(value), threads));
}

int copy_ranges(const std::vector<std::uintptr_t> &dst, const std::vector<std::uintptr_t> &src,
                const std::vector<std::int64_t> &nbytes, int threads) {
  if (src.size() != dst.size() || nbytes.size() != dst.size()) return static_cast<int>(ds::Status::bad_argument);
  std::vector<ds::Move> moves;
  for (std::size_t i = 0; i < dst.size(); i++) moves.push_back({pointer<void>(dst[i]), pointer<void>(src[i]), nbytes[i]});
  py::gil_scoped_release nogil;
  return static_cast<int>(ds::copy_ranges(moves.data(), static_cast<int>(moves.size()), threads));
}

int triad(std::uintptr_t a, std::uintptr_t b, std::uintptr_t c, std::int64_t n, double s, bool streaming, int threads) {
  py::gil_scoped_release nogil;
  return static_cast<int>(ds::triad(pointer<float>(a), pointer<float>(b), pointer<float>(c), n, static_cast<float>(s),
                                    streaming, threads));
}

}  // namespace

void bind_stream(py::module_ &m) {
  m.def("measure_ranges", measure_ranges, py::arg("x"), py::arg("dtype"), py::arg("n"), py::arg("norms"),
        py::arg("partials"), py::arg("threads"));
  m.def("convert", convert, py::arg("dst"), py::arg("dst_dtype"), py::arg("src"), py::arg("src_dtype"), py::arg("n"),
        py::arg("scale"), py::arg("threads"));
  m.def("fill", fill, py::arg("dst"), py::arg("dtype"), py::arg("n"), py::arg("value"), py::arg("threads"));
  m.def("copy_ranges", copy_ranges, py::arg("dst"), py::arg("src"), py::arg("nbytes"), py::arg("threads"));
  m.def("triad", triad, py::arg("a"), py::arg("b"), py::arg("c"), py::arg("n"), py::arg("s"), py::arg("streaming"),
        py::arg("threads"));
  m.attr("norm_block") = ds::norm_block;
}
