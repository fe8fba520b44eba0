{{- /* Prefix of all names. Services take no dot, and no digit first: a release may be called 2024 or v1.5. */}}
{{- define "fairlead.name" -}}
{{- $name := default "fairlead" .Values.nameOverride }}
{{- $release := .Release.Name | replace "." "-" }}
{{- $full := printf "%s-%s" $release $name }}
{{- if .Values.fullnameOverride }}{{ $full = .Values.fullnameOverride }}
{{- else if contains $name $release }}{{ $full = $release }}{{ end }}
{{- if regexMatch "^[0-9]" $full }}{{ $full = printf "fairlead-%s" (trimSuffix "-fairlead" $full) }}{{ end }}
{{- $full | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "fairlead.serviceAccount" -}}
{{- $account := .Values.operator.serviceAccount | default dict }}
{{- if dig "create" true $account }}{{ default (printf "%s-operator" (include "fairlead.name" .)) $account.name }}{{ else }}{{ required "operator.serviceAccount.name: name the account, as operator.serviceAccount.create is false" $account.name }}{{ end }}
{{- end }}

{{- /* Names of all pull secrets, with commas. */}}
{{- define "fairlead.pullSecrets" -}}
{{- $names := list }}
{{- range concat (.Values.images.pullSecrets | default list) ((.Values.global | default dict).imagePullSecrets | default list) }}
{{- if kindIs "string" . }}{{ $names = append $names . }}{{ else }}{{ $names = append $names .name }}{{ end }}
{{- end }}
{{- join "," (uniq $names) }}
{{- end }}

{{- define "fairlead.selector" -}}
app.kubernetes.io/name: fairlead
app.kubernetes.io/instance: "{{ .root.Release.Name }}"
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "fairlead.labels" -}}
{{ include "fairlead.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: "{{ .root.Release.Service }}"
helm.sh/chart: "{{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}"
{{- end }}

{{- define "fairlead.image" -}}
{{- $tag := default .root.Chart.AppVersion .image.tag -}}
{{- /* A tag such as 20260101, unquoted in a values file, is a float to Helm and would be printed as 2.0260101e+07. */}}
{{- if kindIs "float64" $tag }}{{ $tag = int64 $tag }}{{ end -}}
{{- $repository := .image.repository -}}
{{- with (.root.Values.global | default dict).imageRegistry }}
{{- /* A first part with a dot or a port, or localhost, is the registry, as in a reference of docker. */}}
{{- $repository = printf "%s/%s" . (regexReplaceAll "^([^/]*[.:][^/]*|localhost)/" $repository "") -}}
{{- end -}}
{{- if .image.digest }}{{ $repository }}@{{ .image.digest }}{{ else }}{{ $repository }}:{{ $tag }}{{ end }}
{{- end }}

{{- define "fairlead.redisUrl" -}}
{{- if .Values.redis.externalUrl }}{{ .Values.redis.externalUrl }}{{ else }}{{ ternary "rediss" "redis" .Values.redis.tls.enabled }}://{{ include "fairlead.name" . }}-redis.{{ .Release.Namespace }}.svc.{{ .Values.clusterDomain }}:6379{{ end }}
{{- end }}

{{- /* The operator's own Secret, which it creates at its first start. */}}
{{- define "fairlead.credentials" -}}
{{ include "fairlead.name" . }}-redis-credentials
{{- end }}

{{- define "fairlead.podSecurity" -}}
runAsNonRoot: true
{{- if not .Values.openshift }}
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
{{- end }}
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "fairlead.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "fairlead.monitoringNamespaces" -}}
{{- range .Values.monitoring.namespaces }}
- namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: "{{ . }}"}}
{{- end }}
{{- end }}

{{- /* A port in a NetworkPolicy, and that of the mesh's tunnel, to which a mesh sends all traffic. */}}
{{- define "fairlead.policyPorts" -}}
{{- $tunnel := get (dict "istio-ambient" 15008 "linkerd" 4143) (.root.Values.networkPolicy.mesh | default "") }}
[{protocol: TCP, port: {{ .port }}}{{ with $tunnel }}, {protocol: TCP, port: {{ . }}}{{ end }}]
{{- end }}

{{- /* The addresses that the kubelet's probes have in Istio's ambient mode. */}}
{{- define "fairlead.ambientProbes" -}}
- ipBlock: {cidr: 169.254.7.127/32}
- ipBlock: {cidr: "fd16:9254:7127:1337:ffff:ffff:ffff:ffff/128"}
{{- end }}

{{- define "fairlead.watched" -}}
{{- with .Values.watch.namespaces }}{matchExpressions: [{key: kubernetes.io/metadata.name, operator: In, values: {{ toJson . }}}]}{{ else }}{}{{ end }}
{{- end }}

{{- /* Namespace and name of the service for helm test, and whether the chart creates it. */}}
{{- define "fairlead.testNamespace" -}}
{{- default (default .Release.Namespace (first .Values.watch.namespaces)) .Values.test.namespace }}
{{- end }}

{{- define "fairlead.testService" -}}
{{- default (printf "%s-test" (include "fairlead.name" .)) .Values.test.service }}
{{- end }}

{{- /* Comments on objects that are enabled and left out: the output of helm template has no notes. */}}
{{- define "fairlead.leftOut" -}}
{{- range $value, $kind := dict "podMonitors" "PodMonitor" "serviceMonitors" "ServiceMonitor" "rules" "PrometheusRule" }}
{{- $api := printf "monitoring.coreos.com/v1/%s" $kind }}
{{- if and (index $.Values.monitoring $value) (not ($.Capabilities.APIVersions.Has $api)) }}
# NOT rendered: monitoring.{{ $value }}, because this cluster does not serve {{ $api }}. With helm template, give --api-versions={{ $api }}.
{{- end }}
{{- end }}
{{- end }}

{{- /* Labels and placement of the pods of helm test: those of test, otherwise those of the operator. */}}
{{- define "fairlead.testValues" -}}
{{- $made := dict }}
{{- range $key := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" "priorityClassName" "podLabels" "podAnnotations" }}
{{- $_ := set $made $key (default (index $.Values.operator $key) (index $.Values.test $key)) }}
{{- end }}
{{- toYaml $made }}
{{- end }}

{{- define "fairlead.testPodTemplate" -}}
{{- $placed := include "fairlead.placement" (dict "root" .root "values" .values) | fromYaml }}
{{- dict "metadata" (dict "labels" (.values.podLabels | default dict) "annotations" (.values.podAnnotations | default dict)) "spec" $placed | toYaml }}
{{- end }}

{{- /* podTemplate of the service that helm test creates: a tiny model on an emptyDir. */}}
{{- define "fairlead.testWorker" -}}
spec:
  initContainers:
    - name: model
      image: "{{ include "fairlead.image" (dict "root" . "image" .Values.images.worker) }}"
      imagePullPolicy: "{{ .Values.images.pullPolicy }}"
      command: [fairlead, make-model, /models/tiny, --arch, qwen3, --force]
      env:
        - {name: HOME, value: /tmp}
      resources: {{- toYaml .Values.test.resources | nindent 8 }}
      securityContext: {{- include "fairlead.containerSecurity" . | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: models, mountPath: /models}
  containers:
    - name: worker
      resources: {{- toYaml .Values.test.resources | nindent 8 }}
      volumeMounts:
        - {name: models, mountPath: /models, readOnly: true}
  volumes:
    - name: models
      emptyDir: {sizeLimit: 64Mi}
{{- end }}

{{- define "fairlead.podMetadata" -}}
labels:
  {{- $selector := include "fairlead.selector" . | fromYaml }}
  {{- $labels := include "fairlead.labels" . | fromYaml }}
  {{- merge $selector (.values.podLabels | default dict) $labels | toYaml | nindent 2 }}
{{- with .values.podAnnotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "fairlead.placement" -}}
{{- with include "fairlead.pullSecrets" .root }}
imagePullSecrets:
{{- range splitList "," . }}
  - name: "{{ . }}"
{{- end }}
{{- end }}
{{- with .values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.topologySpreadConstraints }}
topologySpreadConstraints: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.priorityClassName }}
priorityClassName: "{{ . }}"
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
