import sys, time; sys.path.insert(0,"/tmp")
import torch, ds_comm, copy
from fam import tiny, ALL
from ds_comm import Mesh, MeshSpec
from ds_testing import world
import pytest
from ds_parallel.tensor.facts import facts_of
from ds_parallel.tensor.plan import make_tensor_plan, TensorOptions
from ds_parallel.tensor.apply import cut_model

@pytest.mark.parametrize("name", ALL)
@world(4)
def test_family(name):
    for degree in (2,4):
        mesh=Mesh.build(MeshSpec.fit(4,tensor=degree))
        m,b=tiny(name); ref,_=tiny(name)
        m.train(); ref.train()
        cut=cut_model(m, make_tensor_plan(facts_of(m),TensorOptions(degree)), mesh["tensor"])
        o=m(**b); r=ref(**b)
        assert torch.allclose(o.logits,r.logits,atol=1e-5,rtol=1e-5), (degree,(o.logits-r.logits).abs().max())
        assert torch.allclose(o.loss,r.loss,atol=1e-6)
        o.loss.backward(); r.loss.backward()
        whole=cut.state_dict()
        refs=ref.state_dict()
        assert whole.keys()==refs.keys()
        for k in refs: assert torch.equal(whole[k],refs[k]),k
        grads=dict(ref.named_parameters(remove_duplicate=False))
        seen=0
        for k,p in m.named_parameters(remove_duplicate=False):
            if k in cut.held:
                h=cut.held[k]; box=h.box(mesh["tensor"].rank); g=grads[h.name].grad
                if g is None: assert p.grad is None; continue
                for d,(o_,s_) in enumerate(zip(box.offset,box.shape)): g=g.narrow(d,o_,s_)
            else:
                if k not in grads: continue
                g=grads[k].grad
            if g is None: assert p.grad is None,k; continue
            if g.shape!=p.grad.shape: continue
            seen+=1
            assert torch.allclose(p.grad,g,atol=1e-5,rtol=1e-4),(degree,k,(p.grad-g).abs().max(),g.abs().max())
        assert seen>5
