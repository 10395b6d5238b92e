{{/*
What weights and cache take, in GiB, by the rules of kvboost.hf.budget: on a CPU a share of what the weights leave of
the container's limit, on a GPU a share of the GPU. Fails for what cannot fit.
*/}}

{{- define "kvboost.cacheGiB" -}}
{{- if ne .Values.cache.sizeGiB nil }}{{ .Values.cache.sizeGiB }}
{{- else }}{{ mulf .Values.cache.ratio (subf .Values.memory.limitGiB .Values.model.weightsGiB) }}
{{- end }}
{{- end }}

{{- define "kvboost.memoryRequestGiB" -}}
{{- if .Values.gpu.enabled }}{{ mulf 1.15 .Values.model.weightsGiB }}
{{- else }}{{ mulf 1.15 (addf .Values.model.weightsGiB (include "kvboost.cacheGiB" . | float64)) }}
{{- end }}
{{- end }}

{{- define "kvboost.memoryRequest" -}}
{{- printf "%dMi" (include "kvboost.memoryRequestGiB" . | float64 | mulf 1024.0 | ceil | int64) }}
{{- end }}

{{- define "kvboost.checkMemory" -}}
{{- $weights := float64 .Values.model.weightsGiB }}
{{- $ratio := float64 .Values.cache.ratio }}
{{- $limit := .Values.memory.limitGiB }}
{{- if .Values.gpu.enabled }}
{{- if ne .Values.gpu.memoryGiB nil }}
{{- $share := divf (float64 .Values.cache.sizeGiB) .Values.gpu.memoryGiB }}
{{- if eq .Values.cache.sizeGiB nil }}{{ $share = $ratio }}{{ end }}
{{- $sum := addf (divf $weights .Values.gpu.memoryGiB) $share 0.15 }}
{{- if gt $sum 1.0001 }}
{{- fail (printf "cache does not fit: of gpu.memoryGiB=%v the weights take %.0f %%, the cache %.0f %%, and 15 %% stay free for running requests. Lower cache.ratio (or cache.sizeGiB), or take a larger GPU." .Values.gpu.memoryGiB (mulf 100 (divf $weights .Values.gpu.memoryGiB)) (mulf 100 $share)) }}
{{- end }}
{{- end }}
{{- else }}
{{- if and (eq $limit nil) (eq .Values.cache.sizeGiB nil) }}
{{- fail "memory.limitGiB is not set: a cache.ratio needs it. Set memory.limitGiB, or cache.sizeGiB." }}
{{- end }}
{{- if and (ne $limit nil) (eq .Values.cache.sizeGiB nil) }}
{{- $share := divf $weights $limit }}
{{- if gt (addf $share (mulf $ratio (subf 1.0 $share)) 0.15) 1.0001 }}
{{- fail (printf "cache.ratio=%v does not fit: of memory.limitGiB=%v the weights take %.0f %%, the cache %.0f %%, and 15 %% stay free for running requests. Lower cache.ratio, or raise memory.limitGiB." $ratio $limit (mulf 100 $share) (mulf 100 $ratio (subf 1.0 $share))) }}
{{- end }}
{{- end }}
{{- end }}
{{- if ne $limit nil }}
{{- $request := include "kvboost.memoryRequestGiB" . | float64 }}
{{- if gt $request (float64 $limit) }}
{{- fail (printf "memory.limitGiB=%v is below the request of %.2f GiB, 1.15 times what weights and cache take. Raise it, or lower cache.sizeGiB." $limit $request) }}
{{- end }}
{{- end }}
{{- end }}
