//! Chat templates for model files that carry none: the form in which the models of a family were trained to talk.

use crate::tokenizer::Tokenizer;

/// ChatML, the form of every model with `<|im_start|>`.
const CHATML: &str = "\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}";

/// Gemma 1 to 3: no system turn, its text goes before the first user text; the assistant is called `model`.
const GEMMA: &str = "\
{{- bos_token -}}
{%- set ns = namespace(system='') -%}
{%- for message in messages -%}
{%- if message.role == 'system' -%}
{%- set ns.system = ns.system + message.content | trim + '\\n\\n' -%}
{%- else -%}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' -}}
{%- if message.role == 'user' -%}{{- ns.system -}}{%- set ns.system = '' -%}{%- endif -%}
{{- message.content | trim + '<end_of_turn>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}";

/// Gemma 4: a system turn like the others.
const GEMMA4: &str = "\
{{- bos_token -}}
{%- for message in messages -%}
{{- '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' + message.content | trim + '<turn|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|turn>model\\n' -}}{%- endif -%}";

/// Llama 3.
const LLAMA3: &str = "\
{{- bos_token -}}
{%- for message in messages -%}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}";

/// For base models without markers: a transcript, which they continue.
const PLAIN: &str = "\
{{- bos_token -}}
{%- set names = {'system': 'System', 'user': 'User', 'assistant': 'Assistant'} -%}
{%- for message in messages -%}
{{- names[message.role] + ': ' + message.content | trim + '\\n\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'Assistant:' -}}{%- endif -%}";

/// The template for a file of this architecture that has none, as name and source. The tokens decide first, because they
/// say more about the training than the architecture does. `None` for models that don't generate text.
pub fn default_template(arch: &str, tokenizer: &Tokenizer) -> Option<(&'static str, &'static str)> {
    const BY_MARKER: &[(&str, &str, &str)] = &[
        ("<|im_start|>", "chatml", CHATML),
        ("<|turn>", "gemma4", GEMMA4),
        ("<start_of_turn>", "gemma", GEMMA),
        ("<|start_header_id|>", "llama3", LLAMA3),
    ];
    let is_encoder = arch.contains("bert") || arch == "t5encoder" || arch.ends_with("-embedding");
    if is_encoder {
        return None;
    }
    let by_marker = BY_MARKER.iter().find(|(marker, _, _)| tokenizer.token_id(marker).is_some());
    Some(by_marker.map_or(("plain", PLAIN), |&(_, name, source)| (name, source)))
}
