"""Further forms in which commands are shown: each gives the flags that the server gets, or is refused."""

from typing import Any

import pytest

from servers.command import parse_command
from servers.flags.words import FlagError
from servers.shell_words import split_statements

EIGHT: dict[str, Any] = {"max_num_seqs": 8}
BOTH: dict[str, Any] = {"max_num_seqs": 8, "enforce_eager": True}
DRAFTS = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}

SHELL: list[tuple[str, dict[str, Any]]] = [
    ('E="--max-num-seqs 8 --enforce-eager"; vllm serve m $E', BOTH),
    ("E='--max-num-seqs 8'\nE=\"$E --enforce-eager\"\nexec vllm serve m ${E}", BOTH),
    ("A=(--max-num-seqs 8)\nA+=(\n  --enforce-eager  # no graphs\n)\nvllm serve m \"${A[@]}\"", BOTH),
    ("CMD='vllm serve m --max-num-seqs 8'; $CMD", EIGHT),
    ("A='--max-num-seqs 8'; eval \"vllm serve m $A --enforce-eager\"", BOTH),
    ("vllm serve m > log --max-num-seqs 8", EIGHT),
    ("vllm serve m 2>&1 --max-num-seqs 8 | tee log.txt", EIGHT),
    ("vllm serve m >>log 2>err </dev/null --max-num-seqs 8 &", EIGHT),
    ("vllm serve m &> log --max-num-seqs 8", EIGHT),
    ("vllm serve m --max-num-seqs 8 > >(tee out) 2> >(tee err >&2)", EIGHT),
    ("(cd /srv; vllm serve m --max-num-seqs 8) &", EIGHT),
    ("SEQS=8; vllm serve m --max-num-seqs=${SEQS:-64}", EIGHT),
    ("vllm serve m --max-num-seqs ${SEQS:-${OTHER:-8}}", EIGHT),
    ("vllm serve m ${SEQS:---max-num-seqs 8}", EIGHT),
    ("E=1\nvllm serve m --max-num-seqs 8 ${E:+--enforce-eager}", BOTH),
    ("if true; then\n  vllm serve m --max-num-seqs 8\nfi", EIGHT),
    ("serve() {\n  vllm serve m --max-num-seqs 8\n}\nserve", EIGHT),
    ("bash -euo pipefail -c 'S=8; vllm serve m --max-num-seqs $S'", EIGHT),
    ("bash <<'EOF'\nvllm serve m --max-num-seqs 8\nEOF", EIGHT),
    ("vllm serve m --max-num-seqs 8 # --enforce-eager", {"max_num_seqs": 8, "enforce_eager": None}),
    ("vllm serve m \\  # the model\n  --max-num-seqs 8", EIGHT),
    ("vllm serve m\n  --max-num-seqs 8\n  --enforce-eager", BOTH),
    ("--max-num-seqs 8  # a cap\n--enforce-eager", BOTH),
    ("user@gpu1:~$ vllm serve m --max-num-seqs 8", EIGHT),
    ("(venv) $ vllm serve m --max-num-seqs 8", EIGHT),
    ("```bash\nvllm serve m --max-num-seqs 8\n```", EIGHT),
    ("`vllm serve m --max-num-seqs 8`", EIGHT),
    ("echo starting vllm serve m; vllm serve m --max-num-seqs 8", EIGHT),
    ("vllm serve \"$MODEL\" --host $HOST --port ${PORT} --api-key $KEY --max-num-seqs 8", EIGHT),
    ("vllm serve <model> --max-num-seqs 8", EIGHT),
    ("vllm serve m --served-model-name $'it\\'s' --max-num-seqs 8", EIGHT),
    ("vllm serve m --max-num-seqs\u00a08 --enforce-eager", BOTH),
    ("vllm serve m `\r\n  --max-num-seqs 8 `\r\n  --enforce-eager\r\n", BOTH),
    ("vllm serve m ^\n  --max-num-seqs 8 ^\n  --enforce-eager", BOTH),
    ("vllm serve m --speculative-config ‘{“method”: “ngram”, “num_speculative_tokens”: 3}’", DRAFTS),
    ('vllm serve m --speculative-config "{\\"method\\": \\"ngram\\", \\"num_speculative_tokens\\": 3}"',
     DRAFTS),
    ("N=3; vllm serve m --speculative-config '{\"method\":\"ngram\",\"num_speculative_tokens\":'$N'}'",
     DRAFTS),
    ("vllm serve m --speculative-config.method ngram --speculative-config.num_speculative_tokens=3", DRAFTS),
    ("vllm serve m --compilation-config.cudagraph_capture_sizes+ 1,2 -cc.cudagraph_capture_sizes+=4",
     {"compilation_config": {"cudagraph_capture_sizes": [1, 2, 4]}}),
    ("vllm serve m --max-num-batched 8k --enforce", {"max_num_batched_tokens": 8000, "enforce_eager": True}),
    ("srun -n1 apptainer exec --nv img.sif vllm serve m --max-num-seqs 8", EIGHT),
    ("tmux new -d -s v 'x'; CUDA_VISIBLE_DEVICES=0,1 nohup vllm serve m --max-num-seqs 8 &> l &", EIGHT),
    ("sudo A=b /opt/bin/vllm serve m --max-num-seqs 8", EIGHT),
]  # fmt: skip
CONTAINERS: list[tuple[str, dict[str, Any]]] = [
    ("docker run -d -p8000:8000 -v/m:/m --gpus=all vllm/vllm-openai:v0.8 --model m --max-num-seqs 8", EIGHT),
    ("docker container run --rm -itp 80:80 -e=HF_TOKEN vllm/vllm-openai m --max-num-seqs 8", EIGHT),
    ("docker run -e S=8 --entrypoint sh vllm/vllm-openai -c 'vllm serve m --max-num-seqs $S'", EIGHT),
    ("docker run -v $(pwd):/m -u $(id -u) vllm/vllm-openai --model /m/x --max-num-seqs 8", EIGHT),
    ("docker run -e SM_VLLM_MODEL=m -e SM_VLLM_MAX_NUM_SEQS=8 -e SM_VLLM_ENFORCE_EAGER= my/vllm-sagemaker:1",
     BOTH),
    ("docker exec -it box bash -c 'vllm serve m --max-num-seqs 8 > /log 2>&1'", EIGHT),
    ("docker run -i pytorch:2 bash <<EOF\npip install vllm\nvllm serve m --max-num-seqs 8\nEOF", EIGHT),
    ("""services:
  prometheus: {image: prom/prometheus, command: --config.file=/etc/p.yml}
  vllm:
    image: vllm/vllm-openai:v0.18.1
    command: |
      --model m \\
      --max-num-seqs 8 \\
      --enforce-eager
""", BOTH),
    ("""services:
  vllm:
    image: nvidia/cuda
    environment: [SEQS=8]
    entrypoint: [bash, -c]
    command: ["exec vllm serve m --max-num-seqs $${SEQS:-64}"]
""", EIGHT),
    ("""apiVersion: apps/v1
kind: Deployment
spec:
  containers:
    - name: server
      image: vllm/vllm-openai
      command: [/bin/sh, -c]
      args:
        - |
          export EXTRA="--enforce-eager"
          vllm serve m --max-num-seqs ${SEQS:-64} $EXTRA
      env: [{name: SEQS, value: "8"}]
""", BOTH),
    ("""apiVersion: serving.kserve.io/v1beta1
kind: InferenceService
spec:
  predictor:
    model:
      modelFormat: {name: huggingface}
      args: [--model_name=m, --model_id=m, --max-num-seqs=8, --enforce-eager]
""", BOTH),
    ("""applications:
  - name: llms
    import_path: ray.serve.llm:build_openai_app
    args:
      llm_configs:
        - model_loading_config: {model_id: m}
          engine_kwargs:
            max_num_seqs: 8
            enforce_eager: true
            speculative_config: {method: ngram, num_speculative_tokens: 3}
""", {**BOTH, **DRAFTS}),
    ("""servingEngineSpec:
  modelSpec:
    - name: m
      repository: vllm/vllm-openai
      modelURL: org/m
      vllmConfig:
        maxNumSeqs: 8
        gpuMemoryUtilization: 0.85
        extraArgs: {max-num-batched-tokens: 4096}
""", {"max_num_seqs": 8, "max_num_batched_tokens": 4096, "gpu_memory_utilization": 0.85}),
    ("image: {repository: vllm/vllm-openai, tag: v0.18.1}\nargs: [--model, m]\nextraArgs: [--max-num-seqs=8]",
     EIGHT),
    ("max-num-seqs: 8\nenforce-eager: true\nmodel: m\n", BOTH),
    ("envs: {SEQS: 8}\nresources: {cpus: 4}\nrun: |\n  vllm serve m --max-num-seqs $SEQS\n", EIGHT),
    ("web: vllm serve m --max-num-seqs 8\n", EIGHT),
    ("commands:\n  - export S=8\n  - vllm serve m --max-num-seqs $S\n", EIGHT),
    ('{"containerDefinitions": [{"image": "vllm/vllm-openai", "command": ["--max-num-seqs", "8"],'
     ' "environment": [{"name": "A", "value": "b"}]}]}', EIGHT),
    ('{"Image": "1.dkr.ecr.us-east-1.amazonaws.com/vllm:0.11-sagemaker", "Environment": '
     '{"SM_VLLM_MODEL": "m", "SM_VLLM_MAX_NUM_SEQS": "8"}}', EIGHT),
    ("""[Service]
Environment="E=--max-num-seqs 8 --enforce-eager" MODEL=m
ExecStart=
ExecStart=/opt/bin/vllm serve ${MODEL} $E
""", BOTH),
    ("""[program:vllm]
command=/opt/bin/vllm serve m
    --max-num-seqs %(ENV_SEQS)s --enforce-eager ; as measured
environment=SEQS="8",HF_HOME=/data
autostart=true
""", BOTH),
]  # fmt: skip


@pytest.mark.parametrize(("text", "flags"), [*SHELL, *CONTAINERS])
def test_read_right(text: str, flags: dict[str, Any]) -> None:
    found = parse_command(text).flags
    assert {name: found.get(name) for name in flags} == flags


REFUSED = [
    ("vllm serve $VLLM_ARGS", "it may be flags. Write them out"),
    ("vllm serve m $EXTRA", "it may be flags. Write them out"),
    ("vllm serve --model m --served-model-name a $EXTRA", "EXTRA. stands for is not known here"),
    ("vllm serve \"$@\"", "it may be flags"),
    ("vllm serve m --max-num-seqs $(nproc)", "is not known here"),
    ("vllm serve m --max-num-seqs `nproc`", "is not known here"),
    ("vllm serve m --kv-cache-dtype ${DTYPE}", "is not known here"),
    ("vllm serve m --kv-cache-dtype fp8_$KIND", "is not known here"),
    ("vllm serve m --kv-cache-dtype %DTYPE%", "is not known here"),
    ("vllm serve m --max-num-seqs <N>", "is not known here"),
    ("vllm serve m --speculative-config \"{\\\"num_speculative_tokens\\\": $N}\"", "is not known here"),
    ("A=--enforce-eager; [ -n \"$B\" ] && A=\"$A --max-num-seqs 8\"; vllm serve m $A", "it may be flags"),
    ("A=1\nif [ $B = 1 ]; then A=2; fi\nvllm serve m --max-num-seqs $A", "is not known here"),
    ("for n in 8 16; do vllm serve m --max-num-seqs $n; done", "is not known here"),
    ("if a; then vllm serve m --max-num-seqs 8; else vllm serve m; fi", "several servers"),
    ("source env.sh; vllm serve m --max-num-seqs $SEQS", "is not known here"),
    ("vllm serve m \\\n  # --seed 64 \\\n  --max-num-seqs 8", "a comment ends the command before --max"),
    ("vllm serve m --a 1\n# --b 2\n--max-num-seqs 8", "a comment ends the command before --max-num-seqs"),
    ("vllm serve m --override(3)", "Put them in single quotes"),
    ("vllm serve m \"--max-num-seqs 8\"", "one word that holds several"),
    ("vllm serve \"m --max-num-seqs 8\"", "one word that holds several"),
    ("vllm serve m --kv-cache-dtype 'fp8 --max-num-seqs 8'", "one word that holds several"),
    ("vllm serve m —max-num-seqs 8", "typographic dash: write '--max-num-seqs'"),
    ("vllm serve m --served-model-name a −−max-num-seqs 8", "typographic dash"),
    ("vllm serve m --max‑num‑seqs 8", "Is --max-num-seqs meant"),
    ("vllm serve m --speculative-config.num-speculative-tokens 3", "keys behind a dot have underscores"),
    ("vllm serve m --speculative-config {\"method\":\"ngram\"}", "is not JSON"),
    ("cat > run.sh <<EOF\nvllm serve m --max-num-seqs 8\nEOF\nbash run.sh", "no server is named"),
    ("cat <<EOF\nvllm serve m", "text has no end"),
    ("docker run -e VLLM_ARGS='--max-num-seqs 8' my/vllm:1", "makes a flag of its variable VLLM_ARGS"),
    ("docker run -e MAX_NUM_SEQS=8 runpod/worker-v1-vllm:v2", "makes a flag of its variable MAX_NUM_SEQS"),
    ("docker run -e SM_VLLM_MAX_NUM_SEQS=8 vllm/vllm-openai:v0.18.1", "does not read SM_VLLM_"),
    ("docker run -e SM_VLLM_MAX_NUM_SEQS=8 vllm-sagemaker --max-num-seqs 4", "give them once"),
    ("docker run --env-file e vllm-sagemaker:1", "takes its flags from variables SM_VLLM_"),
    ("services: {v: {image: vllm/vllm-openai, command: '--max-num-seqs ${SEQS}'}}", "is not known here"),
    ("services: {v: {image: vllm/vllm-openai, command: '--model m > log'}}", "'>' belongs to no flag"),
    ("containers: [{image: vllm/vllm-openai, args: ['--model m --max-num-seqs 64']}]", "holds several"),
    ("containers: [{image: vllm/vllm-openai, args: ['--max-num-seqs 64']}]", "holds several"),
    ("containers: [{image: vllm/vllm-openai, command: [vllm serve m --max-num-seqs 64]}]", "holds several"),
    ("containers: [{image: i, command: [vllm, serve, m], args: [--max-num-seqs: 64]}]", "an item is no text"),
    ("containers: [{image: i, command: [vllm, serve, m], args: {max-num-seqs: 64}}]", "args within it"),
    ("containers: [{image: vllm/vllm-openai, args: [--max-num-seqs, $(SEQS)]}]", "is not known here"),
    ("vllmConfig: {maxNumSequences: 64, dtype: auto, maxModelLen: 4096}", "Is --max-num-seqs meant"),
    ("args: [--max-num-seqs, {{ .Values.seqs }}]", "a template: give what it becomes"),
    ("args: [--model, m, --kv-cache-dtype, '{{ .Values.kv }}']", "is not known here"),
    ("decode: {args: [--max-num-seqs=8]}\nprefill: {args: [--max-num-seqs=4]}", r"\(decode, prefill\)"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "reason"), REFUSED)
def test_refused(text: str, reason: str) -> None:
    with pytest.raises(FlagError, match=reason):
        parse_command(text)


@pytest.mark.parametrize(
    ("text", "again"),
    [
        ("docker run -e A=b -e C='d e' --rm vllm/vllm-openai --model m --seed 1",
         "docker run -e A=b -e C='d e' --rm vllm/vllm-openai --model m --seed 1"),
        ("docker run --env=A=b --gpus all i vllm serve m", "docker run -e A=b --gpus all i vllm serve m"),
        ("docker run -v $(pwd):/m vllm/vllm-openai --model $MODEL",
         'docker run -v "$(pwd):/m" vllm/vllm-openai --model "${MODEL}"'),
        ("docker run -e SM_VLLM_MODEL=m -e SM_VLLM_SEED=1 -e A=b vllm-sagemaker",
         "docker run -e A=b --entrypoint= vllm-sagemaker vllm serve m --seed 1"),
        ("sudo -u x A=b vllm serve m", "sudo -u x A=b vllm serve m"),
        ("sudo -E env A=b vllm serve m", "sudo -E env A=b vllm serve m"),
        ("A=b taskset -c 0 vllm serve m", "A=b taskset -c 0 vllm serve m"),
        ("A=b bash -c 'C=d exec vllm serve m'", "A=b C=d vllm serve m"),
        ("E='--seed 1'; vllm serve m $E > log", "vllm serve m --seed 1"),
    ],
)  # fmt: skip
def test_written_again(text: str, again: str) -> None:
    command = parse_command(text)
    assert str(command) == again
    assert parse_command(again) == command


@pytest.mark.parametrize(
    ("text", "statements"),
    [
        ("a 'b c' \"d $e\" f\\ g", [["a", "b c", "d ${e}", "f g"]]),
        ("e='x y'; a $e \"$e\" '$e' z$e", [["a", "x", "y", "x y", "$e", "zx", "y"]]),
        ("a=; b $a \"$a\" ''", [["b", "", ""]]),
        ("a | b && c || d; e & f", [["a"], ["b"], ["c"], ["d"], ["e"], ["f"]]),
        ("a 2>/dev/null 3 >x 4>&1 5", [["a", "3", "5"]]),
        ("x=(1 '2 3'); a ${x[@]} \"${x[@]}\" $x \"p${x[@]}s\"",
         [["a", "1", "2", "3", "1", "2 3", "1", "p1", "2 3s"]]),
        ("case $x in 1) a b;; *) c;; esac", [["a", "b"], ["c"]]),
        ("a <<A <<-B b\n1\nA\n2\nB\nc", [["a", "b"], ["c"]]),
        ("a#b #c\nd", [["a#b"], ["d"]]),
        ("a \"${b:-'c d'}\" ${b-e} ${c%%x} $((1 + 2))", [["a", "c d", "e", "${c%%x}", "$((1 + 2))"]]),
        ("a \\\nb\\\n c", [["a", "b", "c"]]),
    ],
)  # fmt: skip
def test_words_as_a_shell_parts_them(text: str, statements: list[list[str]]) -> None:
    assert [found.words for found in split_statements(text)] == statements


def test_only_what_is_exported_reaches_the_server() -> None:
    command = parse_command("A=1; export B=2; C=3; export C; D=4 vllm serve m")
    assert command.env == {"B": "2", "C": "3", "D": "4"}
