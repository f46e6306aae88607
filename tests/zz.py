from tests.extraction import *
def probe(llm):
    reader = StoreReader(llm)
    (out,) = generate(llm, [list(range(1,40))], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    t=[*out.prompt_token_ids,*out.outputs[0].token_ids][:-1]
    d=runner(llm).drafter
    e=dense(llm.llm_engine.vllm_config.model_config.model)(t)[:, list(d.plan.layer_ids)]
    r=reader.rows["0"].float()
    return ((r-e).abs().amax(2)/e.abs().amax(2)).tolist()
