// Runs aten's kernels of CUDA by those of the CPU over the same bytes: emulated device memory is host memory.
//
// While a graph is captured nothing runs: outputs get their shapes from a run on copies, and what is to be done at each replay is kept, by
// address, so that a replay after memory was given back reads what is there then, as on a card.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/copy_native.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>
#include <functional>
#include <iostream>
#include <set>
#include <torch/extension.h>
#include <torch/library.h>
extern "C" std::atomic<long long> emulated_counts[16];
// EMULATED_CUDA_SIZES_ONLY: outputs are allocated, nothing is computed, so that a model of any size shows what the allocator holds.
static const bool sizes_only = getenv("EMULATED_CUDA_SIZES_ONLY") != nullptr;
static bool capturing_now() {
  cudaStreamCaptureStatus st;
  cudaStreamIsCapturing(c10::cuda::getCurrentCUDAStream(), &st);
  return st != cudaStreamCaptureStatusNone;
}
extern "C" bool emulated_graph_add(std::function<void()>);
extern "C" void emulated_settle(cudaStream_t);
extern "C" size_t emulated_copy_max();
static void settle() {
  pybind11::gil_scoped_release *g = nullptr;
  if (Py_IsInitialized() && PyGILState_Check()) g = new pybind11::gil_scoped_release();
  emulated_settle(c10::cuda::getCurrentCUDAStream());
  delete g;
}
static at::Tensor host_alias(const at::Tensor &t, bool hold = true) {
  if (!t.defined() || !t.is_cuda()) return t;
  auto o = at::TensorOptions().dtype(t.dtype()).device(at::kCPU);
  if (t.numel() == 0) {
    auto e = at::empty_strided(t.sizes(), t.strides(), o);
    return e;
  }
  auto r = at::from_blob(const_cast<void *>(t.const_data_ptr()), t.sizes(), t.strides(),
                         hold ? std::function<void(void *)>([t](void *) {}) : std::function<void(void *)>([](void *) {}), o);
  if (t.is_conj()) r._set_conj(true);
  if (t.is_neg()) r._set_neg(true);
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) r.unsafeGetTensorImpl()->set_wrapped_number(true);
  return r;
}
static at::Tensor shape_alias(const at::Tensor &t) {
  auto r = at::empty_strided(t.sizes(), t.strides(), at::TensorOptions().dtype(t.dtype()).device(at::kMeta));
  if (t.is_conj()) r._set_conj(true);
  if (t.is_neg()) r._set_neg(true);
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) r.unsafeGetTensorImpl()->set_wrapped_number(true);
  return r;
}
static c10::IValue host_generator(const c10::IValue &v, c10::Device device) {
  if (v.isNone() && capturing_now()) return v;
  auto g = v.isGenerator() ? v.toGenerator() : at::cuda::detail::getDefaultCUDAGenerator(device.index());
  if (g.device().is_cpu()) return v;
  std::lock_guard<std::mutex> l(g.mutex());
  auto off = g.get_offset();
  auto made = at::detail::createCPUGenerator(g.current_seed() * 1000003ull + off);
  g.set_offset(off + 4);
  return made;
}
static void blank(const at::Tensor &t) { // what was not computed is zero where a program may look at it, as at a norm
  if (t.numel() && t.numel() <= (1 << 16) && t.is_non_overlapping_and_dense()) memset(t.mutable_data_ptr(), 0, t.nbytes());
}
static bool of_shapes(const c10::OperatorHandle &op) {
  // the rest depends on data, or has no rule for shapes
  static const std::set<std::string> by_data = {"aten::equal", "aten::is_nonzero", "aten::nonzero", "aten::masked_select", "aten::_unique2",
                                                "aten::bincount", "aten::unique_dim", "aten::unique_consecutive", "aten::_unique"};
  auto k = op.operator_name();
  if (by_data.count(k.name)) return false;
  return op.hasKernelForDispatchKey(c10::DispatchKey::Meta) || op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
         op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional) ||
         op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
}
static void run_kind(const c10::OperatorHandle &op, torch::jit::Stack *stack, bool shapes);
static bool small(torch::jit::Stack::const_iterator begin, torch::jit::Stack::const_iterator end) {
  // numbers that a program looks at (a norm, what an optimizer does to three elements) are right even so
  constexpr int64_t most = 3 << 18;
  bool tensors = false;
  for (auto i = begin; i != end; ++i) {
    if (i->isTensor()) {
      tensors = true;
      if (i->toTensor().defined() && i->toTensor().numel() > most) return false;
    } else if (i->isTensorList()) {
      for (const at::Tensor &t : i->toTensorVector())
        if (t.numel() > most) return false;
      tensors = true;
    } else if (i->isIntList() && c10::multiply_integers(i->toIntVector()) > most)
      return false;
  }
  return tensors;
}
static void computed(const c10::OperatorHandle &op) {
  static bool told = getenv("EMULATED_CUDA_VERBOSE") != nullptr;
  if (told && sizes_only) std::cerr << "computed: " << op.operator_name() << std::endl;
}
static void run(const c10::OperatorHandle &op, torch::jit::Stack *stack) {
  auto n = op.schema().arguments().size();
  if (!sizes_only || capturing_now() || small(stack->end() - n, stack->end())) return run_kind(op, stack, false);
  if (!of_shapes(op)) return computed(op), run_kind(op, stack, false);
  torch::jit::Stack kept(stack->end() - n, stack->end());
  try {
    run_kind(op, stack, true);
  } catch (const c10::OutOfMemoryError &) {
    throw;
  } catch (const std::exception &e) {
    static const bool verbose = getenv("EMULATED_CUDA_VERBOSE") != nullptr;
    if (verbose) std::cerr << op.operator_name() << ": " << e.what() << std::endl;
    stack->insert(stack->end(), kept.begin(), kept.end());
    computed(op);
    run_kind(op, stack, false);
  }
}
static void run_kind(const c10::OperatorHandle &op, torch::jit::Stack *stack, bool shapes) {
  const auto &schema = op.schema();
  auto n = schema.arguments().size();
  auto args = torch::jit::last(*stack, n).vec();
  torch::jit::drop(*stack, n);
  emulated_counts[0]++;
  if (!capturing_now()) settle();
  c10::Device device(c10::kCUDA, c10::cuda::current_device());
  bool known = false;
  std::vector<std::pair<at::Tensor, at::Tensor>> resized; // original, stand-in
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;
  bool cap = capturing_now();
  auto one = [&](const at::Tensor &t, bool written) {
    if (t.defined() && t.is_cuda() && !known && t.dim() >= 0) {
      device = t.device();
      known = true;
    }
    auto a = shapes && t.defined() && t.is_cuda() ? shape_alias(t) : host_alias(t, !cap);
    if (t.defined() && t.is_cuda() && written) {
      if (t.numel() == 0) resized.emplace_back(t, a);
      pairs.emplace_back(t, a);
    }
    return a;
  };
  torch::jit::Stack inner;
  for (size_t i = 0; i < n; i++) {
    auto &v = args[i];
    auto *info = schema.arguments()[i].alias_info();
    bool w = info && info->isWrite();
    if (v.isTensor())
      inner.emplace_back(one(v.toTensor(), w));
    else if (v.isTensorList()) {
      c10::List<at::Tensor> l;
      for (const auto &t : v.toTensorVector()) l.push_back(one(t, w));
      inner.emplace_back(l);
    } else if (v.isList() && v.toList().elementType()->kind() == c10::TypeKind::OptionalType) {
      c10::List<std::optional<at::Tensor>> l;
      bool ok = true;
      for (const c10::IValue &e : v.toListRef()) {
        if (e.isNone())
          l.push_back(std::nullopt);
        else if (e.isTensor())
          l.push_back(one(e.toTensor(), w));
        else
          ok = false;
      }
      if (ok)
        inner.emplace_back(l);
      else
        inner.push_back(v);
    } else if (v.isDevice()) {
      if (v.toDevice().is_cuda()) {
        if (v.toDevice().has_index()) device = v.toDevice();
        inner.emplace_back(c10::Device(shapes ? c10::kMeta : c10::kCPU));
      } else
        inner.push_back(v);
    } else if (schema.arguments()[i].type()->str().find("Generator") != std::string::npos)
      inner.emplace_back(host_generator(v, device));
    else
      inner.push_back(v);
  }
  auto call = [](const c10::OperatorHandle &op, torch::jit::Stack &st) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto &nm = op.schema().name();
    if (nm == "aten::histc" && st[0].toTensor().scalar_type() != at::kFloat && !c10::isFloatingType(st[0].toTensor().scalar_type())) {
      auto t = st[0].toTensor().scalar_type();
      st[0] = st[0].toTensor().to(at::kDouble);
      op.callBoxed(&st);
      st[0] = st[0].toTensor().to(t);
      return;
    }
    if ((nm == "aten::_softmax" || nm == "aten::_log_softmax") && op.schema().overload_name().empty() && st[2].toBool()) {
      st[0] = st[0].toTensor().to(at::kFloat);
      st[2] = false;
    }
    if ((nm == "aten::_softmax_backward_data" || nm == "aten::_log_softmax_backward_data") && op.schema().overload_name().empty() &&
        st[3].toScalarType() != st[0].toTensor().scalar_type()) {
      auto t = st[3].toScalarType();
      st[3] = st[0].toTensor().scalar_type();
      op.callBoxed(&st);
      st[0] = st[0].toTensor().to(t);
      return;
    }
    op.callBoxed(&st);
  };
  std::shared_ptr<torch::jit::Stack> saved;
  std::shared_ptr<std::vector<std::pair<size_t, at::Tensor>>> outs;
  if (cap) {
    saved = std::make_shared<torch::jit::Stack>(inner);
    outs = std::make_shared<std::vector<std::pair<size_t, at::Tensor>>>();
    // what is written is a copy while a graph is recorded: nothing runs then
    auto copied = [&](const at::Tensor &a) {
      for (auto &p : pairs)
        if (p.second.defined() && a.defined() && p.second.unsafeGetTensorImpl() == a.unsafeGetTensorImpl()) {
          auto c = a.clone();
          p.second = c;
          return c;
        }
      return a;
    };
    for (size_t i = 0; i < inner.size(); i++) {
      auto *info = schema.arguments()[i].alias_info();
      if (!(info && info->isWrite())) continue;
      if (inner[i].isTensor())
        inner[i] = copied(inner[i].toTensor());
      else if (inner[i].isTensorList()) {
        c10::List<at::Tensor> l;
        for (const auto &t : inner[i].toTensorVector()) l.push_back(copied(t));
        inner[i] = l;
      }
    }
  }
  call(op, inner);
  if (shapes)
    for (auto &p : pairs) blank(p.first);
  for (auto &p : resized)
    if (p.second.numel() || p.second.sizes() != p.first.sizes()) {
      p.first.resize_(p.second.sizes());
      if (p.second.numel() && !shapes) host_alias(p.first).copy_(p.second);
    }
  size_t at_return = 0;
  auto fresh = [&](const at::Tensor &r) -> at::Tensor {
    if (!r.defined() || !(r.device().is_cpu() || r.device().is_meta())) return r;
    c10::cuda::CUDAGuard g(device);
    auto out = at::empty_strided(r.sizes(), r.strides(), r.options().device(device));
    if (r.numel() && !cap && !shapes) host_alias(out).copy_(r);
    if (shapes) blank(out);
    if (cap) outs->emplace_back(at_return, host_alias(out, false));
    return out;
  };
  for (size_t i = 0; i < schema.returns().size(); i++) {
    auto &v = inner[i];
    at_return = i;
    auto *info = schema.returns()[i].alias_info();
    if (v.isTensor()) {
      auto t = v.toTensor();
      bool done = false;
      if (info)
        for (auto &p : pairs)
          if (p.second.defined() && t.defined() && p.second.unsafeGetTensorImpl() == t.unsafeGetTensorImpl()) {
            torch::jit::push(*stack, p.first);
            done = true;
            break;
          }
      if (!done) torch::jit::push(*stack, fresh(t));
    } else if (v.isTensorList()) {
      c10::List<at::Tensor> l;
      for (const auto &t : v.toTensorVector()) l.push_back(fresh(t));
      torch::jit::push(*stack, l);
    } else
      torch::jit::push(*stack, v);
  }
  if (cap)
    emulated_graph_add([op, saved, outs, call] {
      torch::jit::Stack st(*saved);
      call(op, st);
      size_t k = 0;
      std::vector<at::Tensor> results;
      for (size_t i = 0; i < st.size(); i++) {
        if (st[i].isTensorList()) {
          for (const auto &t : st[i].toTensorVector()) {
            if (k < outs->size() && (*outs)[k].first == i) (*outs)[k++].second.copy_(t);
          }
        } else if (k < outs->size() && (*outs)[k].first == i) {
          if (st[i].toTensor().numel()) (*outs)[k].second.copy_(st[i].toTensor());
          k++;
        }
      }
    });
}
static at::Tensor &copy_here(at::Tensor &self, const at::Tensor &src, bool nb) {
  if (self.is_cuda() && src.is_cuda()) {
    emulated_counts[0]++;
    if (capturing_now()) {
      auto x = host_alias(self, false), y = host_alias(src, false);
      emulated_graph_add([x, y] {
        at::Tensor z = x;
        z.copy_(y);
      });
      return self;
    }
    settle();
    if (sizes_only && self.nbytes() > emulated_copy_max()) return self;
    auto a = host_alias(self);
    a.copy_(host_alias(src));
    return self;
  }
  return at::native::copy_(self, src, nb);
}
static int64_t choose(const at::Tensor &, const at::Tensor &, const at::Tensor &, const std::optional<at::Tensor> &, double, bool,
                      std::optional<double>, bool) {
  return 0; // plain operators: the numbers of the CPU
}
static int64_t choose_by_size(const at::Tensor &q, const at::Tensor &, const at::Tensor &, const std::optional<at::Tensor> &mask, double, bool,
                              std::optional<double>, bool) {
  return !mask && q.scalar_type() != at::kFloat ? 1 : 2; // flash, or the memory-efficient one
}
static std::vector<std::string> skipped;
static std::vector<std::string> install() {
  static torch::Library lib(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  struct Silent : c10::WarningHandler {
    void process(const c10::Warning &) override {}
  } silent;
  c10::WarningUtils::WarningHandlerGuard quiet(&silent);
  std::set<std::string> never = {"empty.memory_format",
                                 "empty_strided",
                                 "resize_",
                                 "set_.source_Storage_storage_offset",
                                 "set_.source_Storage",
                                 "set_",
                                 "set_.source_Tensor",
                                 "record_stream",
                                 "is_pinned",
                                 "_pin_memory",
                                 "pin_memory",
                                 "_local_scalar_dense",
                                 "copy_",
                                 "_fused_sdp_choice",
                                 "is_set_to",
                                 "_resize_output_",
                                 "equal_",
                                 "_efficientzerotensor",
                                 "_has_compatible_shallow_copy_type"};
  auto &d = c10::Dispatcher::singleton();
  int count = 0;
  for (const auto &name : d.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    auto op = d.findSchema(name);
    if (!op) continue;
    auto full = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    if (never.count(full)) continue;
    if (!op->hasKernelForDispatchKey(c10::DispatchKey::CUDA)) continue;
    bool cpu = op->hasKernelForDispatchKey(c10::DispatchKey::CPU) ||
               op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
               op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) ||
               op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional);
    const auto &s = op->schema();
    bool view = false;
    for (auto &r : s.returns())
      if (r.alias_info() && !r.alias_info()->isWrite()) view = true;
    if (view) continue;
    if (!cpu) {
      skipped.push_back(full);
      continue;
    }
    lib.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run>());
    count++;
  }
  if (sizes_only) // what a compiled kernel would have written is zero, too, where a program may look at it
    c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker([](const c10::cuda::CUDACachingAllocator::TraceEntry &entry) {
      if (entry.action_ == c10::cuda::CUDACachingAllocator::TraceEntry::ALLOC && entry.size_ <= (1 << 17))
        memset((void *)entry.addr_, 0, entry.size_);
    });
  lib.impl("copy_", &copy_here);
  lib.impl("_fused_sdp_choice", sizes_only ? &choose_by_size : &choose);
  return skipped;
}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("install", &install);
  m.def("capturing", &capturing_now);
  m.def("settle", &settle);
  m.def("record", [](py::object f) {
    auto p = new py::object(f);
    emulated_graph_add([p] {
      py::gil_scoped_acquire g;
      (*p)();
    });
  });
}
